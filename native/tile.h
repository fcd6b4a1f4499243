// Code that both passes share: tiles of tensors, their transposition, the bits of a tile, and the lists of an index.
// Shapes: B batch elements, H heads (c.heads) over Hkv key heads (c.kv_heads), Nq queries, Nk keys, D head_dim, Dv
// value_dim. A head in one number is b * H + h.
#pragma once
#include "matmul.h"
#include "platform.h"
#include "ringtile.h"

namespace ISA {

// Time counts as packing during its lifetime. It reads no clock if the call does not request times.
struct Packing {
    int64_t *times, began;

    INLINE explicit Packing(const ringtile_call &c) : times(c.work.times), began(times ? nanoseconds() : 0) {}
    INLINE ~Packing() {
        if (times) times[0] += nanoseconds() - began;
    }
};

// The processor's preparation for a policy on vectors: there is none.
struct VectorUnit {};

INLINE int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }

// The first of `count` numbers for which `below` is false. It is true for all numbers before it.
template <class F> INLINE int64_t bisect(int64_t count, F below) {
    int64_t low = 0;
    while (count > 0) {
        int64_t half = count / 2;
        if (below(low + half)) low += half + 1, count -= half + 1;
        else count = half;
    }
    return low;
}

constexpr int MAX_BLOCK = 128, MAX_WORDS = MAX_BLOCK / 32;

// The 32-bit words of a row of a tile's bits.
INLINE int words_of(const ringtile_call &c) { return (c.block + 31) / 32; }

// Rows of a tensor's head, `step` elements apart.
template <class E> struct Rows {
    const E *x;
    int64_t step;

    INLINE const E *row(int64_t i) const { return x + i * step; }
};

template <class E> INLINE Ahead ahead_of(Rows<E> rows, int64_t first, int64_t count, int64_t width) {
    return {rows.row(first), rows.step * (int64_t)sizeof(E), width * (int64_t)sizeof(E), count};
}

// One side of a tile: lane i stands for token first + i, which exists for the lanes [low, high). Lane 0 is at `position`.
struct Side {
    int64_t first;
    int low, high;
    int64_t position;
};

INLINE Side row_tokens(const ringtile_call &c, int64_t row) {
    int64_t tile = c.index.start / c.block - (c.index.start % c.block < 0) + row, begin = tile * c.block - c.index.start;
    return {begin, (int)max(0, -begin), (int)min(c.block, c.n_queries - begin),
            (c.index.row_at ? c.index.row_at[row] : tile) * c.block};
}

INLINE Side col_tokens(const ringtile_call &c, int64_t col) {
    return {col * c.block, 0, (int)min(c.block, c.n_keys - col * c.block),
            (c.index.col_at ? c.index.col_at[col] : col) * c.block};
}

// Dims in whole tiles of 16, for policies that add nothing smaller.
INLINE int64_t round16(int64_t dims) { return (dims + 15) / 16 * 16; }

// A query head of a batch element, its key head, and its group of tile lists.
struct Head {
    int64_t number, b, h, kv, group;

    INLINE Head(const ringtile_call &c, int64_t number)
        : number(number), b(number / c.heads), h(number % c.heads), kv(h / (c.heads / c.kv_heads)),
          group(c.index.group[b * c.index.group_stride[0] + h * c.index.group_stride[1]]) {}
};

template <class E> INLINE Rows<E> rows_of(const void *x, const int64_t *stride, int64_t b, int64_t h, Side tokens) {
    return {(const E *)x + b * stride[0] + h * stride[1] + (tokens.first + tokens.low) * stride[2], stride[2]};
}
template <class E> INLINE Rows<E> query_rows(const ringtile_call &c, const Head &head, Side queries) {
    return rows_of<E>(c.q, c.q_stride, head.b, head.h, queries);
}
template <class E> INLINE Rows<E> key_rows(const ringtile_call &c, const Head &head, Side keys) {
    return rows_of<E>(c.k, c.k_stride, head.b, head.kv, keys);
}
template <class E> INLINE Rows<E> value_rows(const ringtile_call &c, const Head &head, Side keys) {
    return rows_of<E>(c.v, c.v_stride, head.b, head.kv, keys);
}
template <class E> INLINE Rows<E> out_grad_rows(const ringtile_call &c, const Head &head, Side queries) {
    return rows_of<E>(c.backward.out_grad, c.backward.out_grad_stride, head.b, head.h, queries);
}

#if defined(__AVX512F__)
// Swap the off-diagonal quarters of squares: rows i and i + SIDE, lanes l and l + SIDE, and ADD the second to the first.
template <int SIDE, bool ADD = false> INLINE void exchange(Vec<float> *x) {
    const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __mmask16 second = _mm512_test_epi32_mask(lane, _mm512_set1_epi32(SIDE));
    const __m512i low = _mm512_mask_add_epi32(lane, second, lane, _mm512_set1_epi32(16 - SIDE));
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(SIDE));
#pragma GCC unroll 16
    for (int i = 0; i < (ADD ? SIDE : 16); i++) {
        if (i & SIDE) continue;
        __m512 a = (__m512)x[i], b = (__m512)x[i + SIDE];
        x[i] = (Vec<float>)_mm512_permutex2var_ps(a, low, b);
        x[i + SIDE] = (Vec<float>)_mm512_permutex2var_ps(a, high, b);
        if (ADD) x[i] += x[i + SIDE];
    }
}
#endif

// Transpose as many rows as a vector has lanes.
template <class T> INLINE void transpose_square(Vec<T> *x) {
    constexpr int L = Lanes<T>::count;
    T y[L][L];
    for (int i = 0; i < L; i++) store(y[i], x[i]);
    for (int i = 0; i < L; i++)
        for (int l = 0; l < L; l++) x[i][l] = y[l][i];
}
#if defined(__AVX512F__)
template <> INLINE void transpose_square<float>(Vec<float> *x) {
    exchange<8>(x);
    exchange<4>(x);
    exchange<2>(x);
    exchange<1>(x);
}
#endif

// The sums of the lanes of as many vectors, which it may change: halves are added, then quarters, and so on.
template <class T> INLINE Vec<T> sums_of(Vec<T> *x) {
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == 4) {
        exchange<8, true>(x);
        exchange<4, true>(x);
        exchange<2, true>(x);
        exchange<1, true>(x);
        return x[0];
    }
#endif
    transpose_square<T>(x);
    for (int half = Lanes<T>::count / 2; half; half /= 2)
        for (int i = 0; i < half; i++) x[i] += x[i + half];
    return x[0];
}

// The first `count` elements of a row, widened, and zeros in the other lanes.
template <class E, class T> INLINE Vec<T> load_row(const E *x, int count) {
    constexpr int L = Lanes<T>::count;
    if (count >= L) return load_wide<E, T>(x);
    T y[L];
    for (int i = 0; i < L; i++) y[i] = i < count ? (T)widen(x[i]) : T(0);
    return load(y);
}

// Transpose and widen the tokens of lanes [low, high) to y[group][d][lane of the group], with zeros in the other lanes of
// [from, to). Groups are counted from lane `from`. `from` and `to` are multiples of a vector's lanes. Each group is
// contiguous because rows of all lanes would use only half of the first cache's sets. `step` is the lanes of a group.
template <class E, class T>
void transpose_in(Rows<E> rows, int low, int high, int from, int to, int64_t width, T sign, T *y, int64_t step = GROUP<T>) {
    constexpr int L = Lanes<T>::count;
    for (int lane = from; lane < to; lane += L) {
        const E *token = rows.x + (lane - low) * rows.step;
        ahead_of(rows, lane + L - low, min(L, high - lane - L), width).fetch(0, L);
        T *column = y + (lane - from) / GROUP<T> * GROUP<T> * width + (lane - from) % GROUP<T>;
        for (int64_t d = 0; d < width; d += L) {
            Vec<T> x[L];
            int count = (int)min(L, width - d);
            if (lane >= low && lane + L <= high && count == L) {
#pragma GCC unroll 16
                for (int i = 0; i < L; i++) x[i] = load_row<E, T>(token + i * rows.step + d, L) * sign;
                transpose_square<T>(x);
#pragma GCC unroll 16
                for (int i = 0; i < L; i++) store(column + (d + i) * step, x[i]);
                continue;
            }
            for (int i = 0; i < L; i++) {
                bool inside = lane + i >= low && lane + i < high;
                x[i] = inside ? load_row<E, T>(token + i * rows.step + d, count) * sign : Vec<T>{};
            }
            transpose_square<T>(x);
            for (int i = 0; i < count; i++) store(column + (d + i) * step, x[i]);
        }
    }
}

// Write sums [d][lane] of the lanes [low, high) to rows of tokens, times a share per lane. A share of zero writes zeros,
// even for a sum of NaN. `rows` points to where lane 0 would be.
template <class E, class T>
void transpose_out(const T *sums, int64_t width, int low, int high, const T *share, E *rows, int64_t step) {
    constexpr int L = Lanes<T>::count;
    for (int lane = low / L * L; lane < high; lane += L) {
        E *token = rows + lane * step;
        Vec<T> factor = load(share + lane);
        for (int64_t d = 0; d < width; d += L) {
            Vec<T> x[L];
            int count = (int)min(L, width - d);
            for (int i = 0; i < L; i++) {
                x[i] = load(sums + (d + (i < count ? i : 0)) * MAX_BLOCK + lane) * factor;
                x[i] = factor == 0 ? Vec<T>{} : x[i];
            }
            transpose_square<T>(x);
            if (lane >= low && lane + L <= high && count == L) {
#pragma GCC unroll 16
                for (int i = 0; i < L; i++) store_narrow<E, T>(token + i * step + d, x[i]);
                continue;
            }
            for (int i = (int)max(0, low - lane); i < L && lane + i < high; i++) {
                E row[L];
                store_narrow<E, T>(row, x[i]);
                for (int l = 0; l < count; l++) token[i * step + d + l] = row[l];
            }
        }
    }
}

// Copy and widen `count` rows of `depth` elements, padded with zeros to `width`. Rows whose bit in `unused` is set become
// zeros, so a NaN there reaches no sum.
template <class E, class T>
void copy_in(Rows<E> rows, int count, int64_t depth, int64_t width, const uint32_t *unused, T *y) {
    constexpr int L = Lanes<T>::count;
    for (int i = 0; i < count; i++) {
        const E *x = rows.row(i);
        T *to = y + i * width;
        if (unused && bit(unused, i)) {
            for (int64_t d = 0; d < width; d++) to[d] = 0;
            continue;
        }
        int64_t d = 0;
        for (; d + L <= depth; d += L) store(to + d, load_wide<E, T>(x + d));
        for (; d < depth; d++) to[d] = (T)widen(x[d]);
        for (; d < width; d++) to[d] = 0;
    }
}

// Set the bits of the keys that the call's own mask and lengths remove. Return true if there are any.
INLINE bool masked_keys(const ringtile_call &c, int64_t b, Side keys, uint32_t *unused) {
    for (int w = 0; w < MAX_WORDS; w++) unused[w] = 0;
    if (!c.options.key_bits && !c.options.key_lengths) return false;
    int64_t length = c.options.key_lengths ? c.options.key_lengths[b] : c.n_keys;
    bool any = false;
    for (int i = 0; i < keys.high; i++) {
        int64_t key = keys.first + i;
        if (key < length && !c.options.key_bits) continue;
        if (key < length && (uint32_t)c.options.key_bits[b * c.options.key_words + (key >> 5)] >> (key & 31) & 1) continue;
        unused[i >> 5] |= 1u << (i & 31);
        any = true;
    }
    return any;
}

// Add the tokens of one side of a partial tile that keep no token of the other side. `any` and `bits` describe the whole
// tile, so a ragged other side needs a look at its own lanes.
INLINE void add_unused(const ringtile_call &c, const int32_t *any, const int32_t *bits, int64_t tile, Side side,
                       Side others, uint32_t *unused) {
    int words = words_of(c);
    for (int w = 0; w < words; w++) unused[w] |= ~(uint32_t)any[tile * words + w];
    if (others.low == 0 && others.high == c.block) return;
    uint32_t inside[MAX_WORDS] = {};
    for (int i = others.low; i < others.high; i++) inside[i >> 5] |= 1u << (i & 31);
    const int32_t *row = bits + (tile * c.block + side.low) * words;
    for (int i = side.low; i < side.high; i++, row += words) {
        uint32_t seen = 0;
        for (int w = 0; w < words; w++) seen |= (uint32_t)row[w] & inside[w];
        unused[i >> 5] |= (uint32_t)(seen == 0) << (i & 31);
    }
}

INLINE bool any_of(const uint32_t *unused, Side side) {
    uint32_t found = 0;
    for (int i = side.low; i < side.high; i++) found |= bit(unused, i);
    return found;
}

// The tokens [first, last) of a tile's other side that include every token that the lanes [low, high) keep. Empty if they
// keep none. `bits` has a row per token, and `unused` removes tokens. Both can be null.
struct Reach {
    int first, last;
};

INLINE Reach reach_of(const int32_t *bits, int words, const uint32_t *unused, int low, int high, int first, int last) {
    if (!bits && !unused) return {first, last};
    uint32_t lanes[MAX_WORDS] = {};
    for (int i = low; i < high; i++) lanes[i >> 5] |= 1u << (i & 31);
    auto reached = [&](int token) {
        if (unused && bit(unused, token)) return false;
        uint32_t seen = 0;
        for (int w = 0; bits && w < words; w++) seen |= (uint32_t)bits[token * words + w] & lanes[w];
        return !bits || seen != 0;
    };
    while (first < last && !reached(first)) first++;
    while (first < last && !reached(last - 1)) last--;
    return {first, last};
}

// The tile list of a row or column slot: full and partial tiles merged, ascending.
struct TileCursor {
    const int32_t *full, *part, *table;
    int32_t n_full, n_part, at_full, at_part;

    INLINE TileCursor(const int32_t *full_ptr, const int32_t *full_list, const int32_t *part_ptr, const int32_t *part_list,
                 const int32_t *tiles, int64_t slot)
        : full(full_list + full_ptr[slot]), part(part_list + part_ptr[slot]), table(tiles + part_ptr[slot]),
          n_full(full_ptr[slot + 1] - full_ptr[slot]), n_part(part_ptr[slot + 1] - part_ptr[slot]), at_full(0),
          at_part(0) {}

    INLINE int64_t length() const { return n_full + n_part; }

    // The next tile's row or column, and its number in the table of bits, -1 for a full tile.
    INLINE bool next(int64_t &other, int64_t &tile) {
        if (at_full == n_full && at_part == n_part) return false;
        if (at_part == n_part || (at_full < n_full && full[at_full] < part[at_part])) {
            other = full[at_full++];
            tile = -1;
        } else {
            tile = table[at_part];
            other = part[at_part++];
        }
        return true;
    }

    INLINE void skip(int64_t count) {
        int64_t other, tile;
        while (count-- > 0) next(other, tile);
    }

    // The number of tiles before a row or column.
    INLINE int64_t before(int64_t other) const {
        return bisect(n_full, [&](int64_t i) { return full[i] < other; }) +
               bisect(n_part, [&](int64_t i) { return part[i] < other; });
    }
};

INLINE TileCursor row_tiles(const ringtile_call &c, int64_t slot) {
    return TileCursor(c.index.full_row_ptr, c.index.full_col, c.index.part_row_ptr, c.index.part_col, c.index.part_tile, slot);
}

INLINE TileCursor col_tiles(const ringtile_call &c, int64_t slot) {
    return TileCursor(c.index.full_col_ptr, c.index.full_row, c.index.part_col_ptr, c.index.part_row, c.index.part_tile_t, slot);
}

}  // namespace ISA
