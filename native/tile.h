// What forward and backward share: tiles of tensors, the bits of a tile, dropout, and the lists of an index.
#pragma once
#include "matmul.h"
#include "platform.h"
#include "ringtile.h"

namespace ISA {

// While it lives, time counts as packing; where the call does not ask for times, nothing is read.
struct Packing {
    int64_t *times, began;

    INLINE explicit Packing(const ringtile_call &c) : times(c.times), began(times ? nanoseconds() : 0) {}
    INLINE ~Packing() {
        if (times) times[0] += nanoseconds() - began;
    }
};

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

constexpr int MAX_BLOCK = 128, MAX_WORDS = MAX_BLOCK / 32;

// Tokens [first, last) of a tensor's head, rows of `width` numbers.
template <class E> struct Rows {
    const E *x;
    int64_t step;
};

template <class E> INLINE Rows<E> rows_of(const void *x, const int64_t *stride, int64_t b, int64_t h, int64_t first) {
    return {(const E *)x + b * stride[0] + h * stride[1] + first * stride[2], stride[2]};
}

// The tile [first, first + count) that the lists name, in lanes of a block; lanes [low, high) hold tokens.
struct Span {
    int64_t first;
    int low, high;
};

INLINE Span row_span(const ringtile_call &c, int64_t row) {
    int64_t begin = (c.start / c.block - (c.start % c.block < 0) + row) * c.block - c.start;
    return {begin, (int)most(0, -begin), (int)least(c.block, c.n_queries - begin)};
}

INLINE Span col_span(const ringtile_call &c, int64_t col) {
    return {col * c.block, 0, (int)least(c.block, c.n_keys - col * c.block)};
}

#if defined(__AVX512F__)
// Quarters of squares change places: rows i and i + SIDE, lanes l and l + SIDE.
template <int SIDE> INLINE void exchange(Vec<float> *x) {
    const __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __mmask16 second = _mm512_test_epi32_mask(lane, _mm512_set1_epi32(SIDE));
    const __m512i low = _mm512_mask_add_epi32(lane, second, lane, _mm512_set1_epi32(16 - SIDE));
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(SIDE));
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
        if (i & SIDE) continue;
        __m512 a = (__m512)x[i], b = (__m512)x[i + SIDE];
        x[i] = (Vec<float>)_mm512_permutex2var_ps(a, low, b);
        x[i + SIDE] = (Vec<float>)_mm512_permutex2var_ps(a, high, b);
    }
}
#endif

// As many rows as a vector has lanes, transposed.
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

// Numbers [0, count) of a row, widened, zero in the other lanes.
template <class E, class T> INLINE Vec<T> load_row(const E *x, int count) {
    constexpr int L = Lanes<T>::count;
    if (count >= L) return load_wide<E, T>(x);
    T y[L];
    for (int i = 0; i < L; i++) y[i] = i < count ? (T)widen(x[i]) : T(0);
    return load(y);
}

// Transposed and widened, the lanes that a register tile takes together apart: y[lane / GROUP][d][lane % GROUP], counted
// from `from` on, for the tokens of lanes [low, high), zero in the other lanes of [from, to). Lanes `from` and `to` are
// multiples of those of a vector. Rows of all lanes would fall on half of the first cache's sets.
template <class E, class T>
void transpose_in(Rows<E> rows, int low, int high, int from, int to, int64_t width, T sign, T *y) {
    constexpr int L = Lanes<T>::count, GROUP = TILE_VECTORS * L;
    for (int lane = from; lane < to; lane += L) {
        const E *token = rows.x + (lane - low) * rows.step;
        T *column = y + (lane - from) / GROUP * GROUP * width + (lane - from) % GROUP;
        for (int64_t d = 0; d < width; d += L) {
            Vec<T> x[L];
            int count = (int)least(L, width - d);
            if (lane >= low && lane + L <= high && count == L) {
#pragma GCC unroll 16
                for (int i = 0; i < L; i++) x[i] = load_row<E, T>(token + i * rows.step + d, L) * sign;
                transpose_square<T>(x);
#pragma GCC unroll 16
                for (int i = 0; i < L; i++) store(column + (d + i) * GROUP, x[i]);
                continue;
            }
            for (int i = 0; i < L; i++) {
                bool inside = lane + i >= low && lane + i < high;
                x[i] = inside ? load_row<E, T>(token + i * rows.step + d, count) * sign : Vec<T>{};
            }
            transpose_square<T>(x);
            for (int i = 0; i < count; i++) store(column + (d + i) * GROUP, x[i]);
        }
    }
}

// Sums [d][lane] to rows of tokens, lanes [low, high), times a share of each lane (zero where that is zero, whatever the
// sum). `rows` is where lane 0 would be.
template <class E, class T>
void transpose_out(const T *sums, int64_t width, int low, int high, const T *share, E *rows, int64_t step) {
    constexpr int L = Lanes<T>::count;
    for (int lane = low / L * L; lane < high; lane += L) {
        E *token = rows + lane * step;
        Vec<T> part = load(share + lane);
        for (int64_t d = 0; d < width; d += L) {
            Vec<T> x[L];
            int count = (int)least(L, width - d);
            for (int i = 0; i < L; i++) {
                x[i] = load(sums + (d + (i < count ? i : 0)) * MAX_BLOCK + lane) * part;
                x[i] = part == 0 ? Vec<T>{} : x[i];
            }
            transpose_square<T>(x);
            if (lane >= low && lane + L <= high && count == L) {
#pragma GCC unroll 16
                for (int i = 0; i < L; i++) store_narrow<E, T>(token + i * step + d, x[i]);
                continue;
            }
            for (int i = (int)most(0, low - lane); i < L && lane + i < high; i++) {
                E row[L];
                store_narrow<E, T>(row, x[i]);
                for (int l = 0; l < count; l++) token[i * step + d + l] = row[l];
            }
        }
    }
}

// Widened rows of `count` tokens, padded with zeros to `width` numbers; rows whose bit in `dead` is set come as zero.
template <class E, class T>
void copy_in(Rows<E> rows, int count, int64_t depth, int64_t width, const uint32_t *dead, T *y) {
    constexpr int L = Lanes<T>::count;
    for (int i = 0; i < count; i++) {
        const E *x = rows.x + i * rows.step;
        T *to = y + i * width;
        if (dead && (dead[i >> 5] >> (i & 31) & 1)) {
            for (int64_t d = 0; d < width; d++) to[d] = 0;
            continue;
        }
        int64_t d = 0;
        for (; d + L <= depth; d += L) store(to + d, load_wide<E, T>(x + d));
        for (; d < depth; d++) to[d] = (T)widen(x[d]);
        for (; d < width; d++) to[d] = 0;
    }
}

// The keys of a column tile that the call's own mask and lengths drop, as a bit set; whether there are any.
INLINE bool dropped_keys(const ringtile_call &c, int64_t b, Span keys, uint32_t *dead) {
    for (int w = 0; w < MAX_WORDS; w++) dead[w] = 0;
    if (!c.key_bits && !c.key_lengths) return false;
    int64_t length = c.key_lengths ? c.key_lengths[b] : c.n_keys;
    bool any = false;
    for (int i = 0; i < keys.high; i++) {
        int64_t key = keys.first + i;
        if (key < length) {
            if (!c.key_bits) continue;
            if ((uint32_t)c.key_bits[b * c.key_words + (key >> 5)] >> (key & 31) & 1) continue;
        }
        dead[i >> 5] |= 1u << (i & 31);
        any = true;
    }
    return any;
}

// Add the tokens of one side of a partial tile that no token of the other side keeps. `any` and `bits` speak of the
// whole tile, so where the other side is ragged its own lanes are looked up.
INLINE void unused_tokens(const ringtile_call &c, const int32_t *any, const int32_t *bits, int64_t tile, Span side,
                          Span others, uint32_t *dead) {
    int words = (c.block + 31) / 32;
    for (int w = 0; w < words; w++) dead[w] |= ~(uint32_t)any[tile * words + w];
    if (others.low == 0 && others.high == c.block) return;
    uint32_t inside[MAX_WORDS] = {};
    for (int i = others.low; i < others.high; i++) inside[i >> 5] |= 1u << (i & 31);
    const int32_t *row = bits + (tile * c.block + side.low) * words;
    for (int i = side.low; i < side.high; i++, row += words) {
        uint32_t seen = 0;
        for (int w = 0; w < words; w++) seen |= (uint32_t)row[w] & inside[w];
        dead[i >> 5] |= (uint32_t)(seen == 0) << (i & 31);
    }
}

// Tokens [first, last) of a tile's other side: what lanes [low, high) of a partial tile keep lies in them. `bits` has a
// row for each token, which `dead` may drop; both may be absent. An empty range where the lanes keep nothing.
struct Reach {
    int first, last;
};

INLINE Reach reach_of(const int32_t *bits, int words, const uint32_t *dead, int low, int high, int first, int last) {
    if (!bits && !dead) return {first, last};
    uint32_t lanes[MAX_WORDS] = {};
    for (int i = low; i < high; i++) lanes[i >> 5] |= 1u << (i & 31);
    auto reached = [&](int token) {
        if (dead && (dead[token >> 5] >> (token & 31) & 1)) return false;
        uint32_t seen = 0;
        for (int w = 0; bits && w < words; w++) seen |= (uint32_t)bits[token * words + w] & lanes[w];
        return !bits || seen != 0;
    };
    while (first < last && !reached(first)) first++;
    while (first < last && !reached(last - 1)) last--;
    return {first, last};
}

// The tiles of a row or column: full and partial ones merged, ascending.
struct Tiles {
    const int32_t *full, *part, *table;
    int32_t n_full, n_part, at_full, at_part;

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
};

INLINE Tiles tiles_of(const int32_t *full_ptr, const int32_t *full, const int32_t *part_ptr, const int32_t *part,
                      const int32_t *table, int64_t slot) {
    int32_t f = full_ptr[slot], p = part_ptr[slot];
    return {full + f, part + p, table + p, full_ptr[slot + 1] - f, part_ptr[slot + 1] - p, 0, 0};
}

INLINE int32_t group_of(const ringtile_call &c, int64_t b, int64_t h) {
    return c.group[b * c.group_stride[0] + h * c.group_stride[1]];
}

}  // namespace ISA
