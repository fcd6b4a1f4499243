// Softcap, ALiBi and biases: score * scale becomes softcap * tanh(score * scale / softcap) - slope * |i - j| + a number in
// memory. A call with one of them has an options.scale of 1, so everything else takes the results for scores. One function
// serves all policies, both passes, which need the same bits, and all sets of AVX-512, so that the library stays small.
#pragma once
#include "tile.h"

// Where a buffer of scores [row][lane] is: its head, the numbers of the first tokens on either side, and how many
// positions lane 0 comes before row 0. KEYS: keys are in the lanes and queries in the rows.
struct Corner {
    int64_t b, h;
    bool keys;
    int64_t lane, row, away;
};

#if defined(__AVX512BF16__) || defined(AMX)
namespace avx512 {
template <class T>
void transform_scores(const ringtile_call &c, const Corner &at, T *scores, T *factors, int64_t step, int vectors,
                      int count);
template <class T> void add_bias_grads(const ringtile_call &c, const Corner &at, T *grads, int lanes, int count);
}
#endif

namespace ISA {

// Hide that a pointer stays the same: compilers would copy a loop for null pointers, and the library would grow.
template <class T> INLINE void opaque(T *&x) { asm("" : "+r"(x)); }

INLINE bool transforms(const ringtile_call &c) { return c.options.softcap != 0 || c.options.slopes || c.options.added; }

#if defined(__AVX512BF16__) || defined(AMX)
using avx512::add_bias_grads;
using avx512::transform_scores;
#else
// A token of a side, or the nearest that exists: lanes and rows outside a tile hold anything.
INLINE int64_t near(int64_t token, int64_t count) { return max(0, min(token, count - 1)); }

// The numbers at so many places.
template <class T> INLINE Vec<T> gathered(const T *x, Ints<T> place) {
    Vec<T> y;
    for (int l = 0; l < Lanes<T>::count; l++) y[l] = x[place[l]];
    return y;
}
#if defined(__AVX512F__)
template <> INLINE Vec<float> gathered<float>(const float *x, Ints<float> place) {
    // Without a mask, gcc 12 warns of its own header.
    return (Vec<float>)_mm512_mask_i32gather_ps(_mm512_setzero_ps(), 0xffff, (__m512i)place, x, 4);
}
#endif

// Whether so many tokens exist from one on, and each place is the next.
INLINE bool follow(const int32_t *places, int64_t first, int count, int64_t tokens) {
    if (first < 0 || first + count > tokens) return false;
    int32_t apart = 0;
    for (int l = 0; l < count; l++) apart |= places[first + l] - places[first] - l;
    return apart == 0;
}

// Multiply scores [count][step] of so many vectors a row by the scale, and add the bias.
template <class T>
__attribute__((noinline)) void add_bias(const ringtile_call &c, const Corner &at, T *scores, int64_t step, int vectors,
                                        int count) {
    constexpr int L = Lanes<T>::count;
    using Integer = typename Lanes<T>::integer;
    const auto &o = c.options;
    const T *numbers = (const T *)o.added + at.b * o.added_stride[0] + at.h * o.added_stride[1];
    const T scale = (T)o.true_scale;
    const Ints<T> last = Ints<T>{} + (Integer)(o.added_places - 1);
    // The place of a pair is that of its key, less that of its query.
    const Integer sign = at.keys ? 1 : -1;
    for (int n = 0; n < vectors; n++) {
        Ints<T> places, rows = {};
        for (int l = 0; l < L; l++) {
            const int64_t lane = near(at.lane + n * L + l, at.keys ? c.n_keys : c.n_queries);
            places[l] = (Integer)(sign * (at.keys ? o.added_keys : o.added_queries)[lane]);
            if (!at.keys) rows[l] = (Integer)(lane * o.added_stride[2]);
        }
        const bool run = at.keys && follow(o.added_keys, at.lane + n * L, L, c.n_keys);
        for (int i = 0; i < count; i++) {
            const int64_t row = near(at.row + i, at.keys ? c.n_queries : c.n_keys);
            const T *from = numbers + (at.keys ? row * o.added_stride[2] : 0);
            T *to = scores + i * step + n * L;
            Ints<T> place = places - (Integer)(sign * (at.keys ? o.added_queries : o.added_keys)[row]);
            if (run && place[0] >= 0 && place[L - 1] <= last[0]) {
                store(to, rounded<T>(load(to) * scale) + load(from + place[0]));
                continue;
            }
            if (!at.keys && i + L <= count && follow(o.added_keys, at.row + i, L, c.n_keys)) {
                Ints<T> outside = (place < 0) | (place > last - (Integer)(L - 1));
                Integer any = 0;
                for (int l = 0; l < L; l++) any |= outside[l];
                if (!any) {
                    // Each query reads a vector of its own: gathers take several times as long.
                    Vec<T> x[L];
#pragma GCC unroll 16
                    for (int l = 0; l < L; l++) x[l] = load(from + rows[l] + place[l]);
                    transpose_square<T>(x);
#pragma GCC unroll 16
                    for (int l = 0; l < L; l++)
                        store(to + l * step, rounded<T>(load(to + l * step) * scale) + x[l]);
                    i += L - 1;
                    continue;
                }
            }
            place = place < 0 ? Ints<T>{} : place;
            place = (place > last ? last : place) + rows;
            store(to, rounded<T>(load(to) * scale) + gathered<T>(from, place));
        }
    }
}

// Add the gradients of scores [query][GROUP] of so many keys in the lanes to those of the bias. Then multiply them by the
// scale, as if the scores had been.
template <class T>
__attribute__((noinline)) void add_bias_grads(const ringtile_call &c, const Corner &at, T *grads, int lanes, int count) {
    constexpr int L = Lanes<T>::count;
    const auto &o = c.options;
    const int64_t *stride = c.backward.added_grad_stride, last = o.added_places - 1;
    const bool adds = at.keys && c.backward.added_grad;
    bool run[NR];
    for (int n = 0; n < NR; n++) run[n] = adds && (n + 1) * L <= lanes && follow(o.added_keys, at.lane + n * L, L, c.n_keys);
    for (int i = 0; i < count; i++)
        for (int n = 0; n < NR; n++) {
            T *row = grads + i * GROUP<T> + n * L;
            if (adds && n * L < lanes) {
                const int32_t *keys = o.added_keys + at.lane + n * L;
                T *to = (T *)c.backward.added_grad + at.b * stride[0] + at.h * stride[1] + (at.row + i) * stride[2];
                const int64_t query = o.added_queries[at.row + i], first = keys[0] - query;
                if (run[n] && first >= 0 && first + L - 1 <= last) store(to + first, load(to + first) + load(row));
                else
                    for (int l = 0; l < min(L, lanes - n * L); l++) to[max(0, min(keys[l] - query, last))] += row[l];
            }
            store(row, load(row) * (T)o.true_scale);
        }
}

// y between -most and most. A NaN stays NaN.
template <class T> INLINE Vec<T> limited(Vec<T> y, T most) {
    y = y > most ? splat<T>(most) : y;
    return y < -most ? splat<T>(-most) : y;
}
#if defined(__AVX512F__)
template <> INLINE Vec<float> limited<float>(Vec<float> y, float most) {
    const __m512 below = _mm512_maskz_min_ps(0xffff, _mm512_set1_ps(most), (__m512)y);
    return (Vec<float>)_mm512_maskz_max_ps(0xffff, _mm512_set1_ps(-most), below);
}
#endif

// The tanh of y * log(2) / 2 as (2^y - 1) / (2^y + 1), where 2^y - 1 is exact near 0. From 2^28 or 2^58 on, it is 1.
template <class T> INLINE Vec<T> tanh_of(Vec<T> y) {
    constexpr bool narrow = sizeof(T) == 4;
    const T most = narrow ? 28 : 58, magic = narrow ? T(12582912.0 + 127) : T(6755399441055744.0 + 1023);
    y = limited<T>(y, most);
    Vec<T> nearest = y + magic, f = y - (nearest - magic), power = (Vec<T>)((Ints<T>)nearest << (narrow ? 23 : 52));
    Vec<T> above = power * (f * rise(f)) + (power - 1);
    return above / (above + 2);
}

// Transform the scores [count][step] of `vectors` vectors a row. Unless they are null, factors receive what the gradients
// of the results are to be multiplied by.
template <class T>
__attribute__((noinline)) void transform_scores(const ringtile_call &c, const Corner &corner, T *scores, T *factors,
                                                int64_t step, int vectors, int count) {
    if (c.options.added) return add_bias(c, corner, scores, step, vectors, count);
    constexpr int L = Lanes<T>::count;
    const double cap = c.options.softcap, true_scale = c.options.true_scale;
    const T scale = (T)true_scale, top = (T)cap, stretch = cap ? T(true_scale / cap * 2.88539008177792681472) : T(0);
    const double *slopes = c.options.slopes;
    Ints<T> lane;
    for (int l = 0; l < L; l++) lane[l] = l;
    for (int i = 0; i < count; i++)
        for (int n = 0; n < vectors; n++) {
            T *at = scores + i * step + n * L;
            Vec<T> s = load(at), t = cap ? tanh_of<T>(rounded<T>(s * stretch)) : Vec<T>{};
            // Each product is rounded by itself: compilers would fuse either with the difference.
            s = cap ? rounded<T>(t * top) : rounded<T>(s * scale);
            if (slopes) {
                // Integers are exact where floats are not.
                const int64_t first = corner.away + i - n * L;
                const bool near = sizeof(T) == 4 && first < 1 << 30 && first > -(1 << 30);
                const auto from = (typename Lanes<T>::integer)(near ? first : 0);
                Vec<T> distance = __builtin_convertvector(lane - from, Vec<T>);
                distance -= near ? T(0) : (T)first;
                s -= rounded<T>((distance < 0 ? -distance : distance) * (T)slopes[corner.h]);
            }
            store(at, s);
            if (factors) store(factors + i * step + n * L, (1 - t * t) * scale);
        }
}
// For the other sets of AVX-512, too.
template void transform_scores(const ringtile_call &, const Corner &, float *, float *, int64_t, int, int);
template void transform_scores(const ringtile_call &, const Corner &, double *, double *, int64_t, int, int);
template void add_bias_grads(const ringtile_call &, const Corner &, float *, int, int);
template void add_bias_grads(const ringtile_call &, const Corner &, double *, int, int);
#endif

}  // namespace ISA
