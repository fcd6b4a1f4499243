// What forward and backward share: tiles of tensors, the bits of a tile, dropout, and the lists of an index.
#pragma once
#include <time.h>

#include "ringtile.h"
#include "simd.h"

namespace ISA {

INLINE int64_t nanoseconds() {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

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

// A tile is transposed so many rows at a time: a line is written whole while it is near, and the lines that are read
// stay near for as many columns. Row by row, every number would go to a line that has left the cache.
constexpr int STRIP = 16;

// Transposed and widened: y[d][lane] for the tokens of lanes [low, high), zero in the other lanes of [from, to).
template <class E, class T>
void transpose_in(Rows<E> rows, int low, int high, int from, int to, int64_t width, T sign, T *y, int64_t y_step) {
    if (from < low || high < to)
        for (int64_t d = 0; d < width; d++)
            for (int lane = from; lane < to; lane++) y[d * y_step + lane] = 0;
    for (int lane = low; lane < high; lane += STRIP) {
        const E *x = rows.x + (lane - low) * rows.step;
        int count = (int)least(STRIP, high - lane);
        for (int64_t d = 0; d < width; d++) {
            T *at = y + d * y_step + lane;
            if (count == STRIP)
                for (int i = 0; i < STRIP; i++) at[i] = sign * (T)widen(x[i * rows.step + d]);
            else
                for (int i = 0; i < count; i++) at[i] = sign * (T)widen(x[i * rows.step + d]);
        }
    }
}

// Widened rows of `count` tokens, padded with zeros to `width` numbers; rows whose bit in `dead` is set come as zero.
template <class E, class T>
void copy_in(Rows<E> rows, int count, int64_t depth, int64_t width, const uint32_t *dead, T *y) {
    for (int i = 0; i < count; i++) {
        const E *x = rows.x + i * rows.step;
        T *to = y + i * width;
        if (dead && (dead[i >> 5] >> (i & 31) & 1)) {
            for (int64_t d = 0; d < width; d++) to[d] = 0;
            continue;
        }
        for (int64_t d = 0; d < depth; d++) to[d] = (T)widen(x[d]);
        for (int64_t d = depth; d < width; d++) to[d] = 0;
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
