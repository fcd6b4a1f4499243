// Softcap and ALiBi: score * scale becomes softcap * tanh(score * scale / softcap) - slope * |i - j|. A call with either
// has an options.scale of 1, so everything else takes the results for scores. One function serves all policies, both
// passes, which need the same bits, and all sets of AVX-512, so that the library stays small.
#pragma once
#include "tile.h"

#if defined(__AVX512BF16__) || defined(AMX)
namespace avx512 {
template <class T>
void transform_scores(const ringtile_call &c, int64_t head, T *scores, T *factors, int64_t step, int vectors, int count,
                      int64_t away);
}
#endif

namespace ISA {

// Hide that a pointer stays the same: compilers would copy a loop for null pointers, and the library would grow.
template <class T> INLINE void opaque(T *&x) { asm("" : "+r"(x)); }

INLINE bool transforms(const ringtile_call &c) { return c.options.softcap != 0 || c.options.slopes; }

#if defined(__AVX512BF16__) || defined(AMX)
using avx512::transform_scores;
#else
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

// Transform the scores [count][step] of `vectors` vectors a row, whose first is `away` positions after lane 0's. Unless
// they are null, factors receive what the gradients of the results are to be multiplied by.
template <class T>
__attribute__((noinline)) void transform_scores(const ringtile_call &c, int64_t head, T *scores, T *factors,
                                                int64_t step, int vectors, int count, int64_t away) {
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
                const int64_t first = away + i - n * L;
                const bool near = sizeof(T) == 4 && first < 1 << 30 && first > -(1 << 30);
                const auto from = (typename Lanes<T>::integer)(near ? first : 0);
                Vec<T> distance = __builtin_convertvector(lane - from, Vec<T>);
                distance -= near ? T(0) : (T)first;
                s -= rounded<T>((distance < 0 ? -distance : distance) * (T)slopes[head]);
            }
            store(at, s);
            if (factors) store(factors + i * step + n * L, (1 - t * t) * scale);
        }
}
// For the other sets of AVX-512, too.
template void transform_scores(const ringtile_call &, int64_t, float *, float *, int64_t, int, int, int64_t);
template void transform_scores(const ringtile_call &, int64_t, double *, double *, int64_t, int, int, int64_t);
#endif

}  // namespace ISA
