// The forward pass by tiles. Scores are K Q^T with the keys' rows read where they lie, weighted values V^T P^T: so
// queries are in the columns of all products, as they are in the lanes of vectors. TileCursor and vectors slow each other
// down, so products come in bursts, and the softmax between them.
#pragma once
#include "amx.h"
#include "softmax.h"

namespace ISA {

typedef uint32_t Unsigned __attribute__((vector_size(VECTOR_BYTES)));

constexpr int AMX_BYTES = 4 * AMX_NUMBERS;
constexpr int AMX_KEYS = 32, KEY_TILES = MAX_BLOCK / AMX_KEYS;  // the keys that a product adds up

// Numbers of other types than bfloat16 are sums of two bfloat16 numbers: the first eight bits of each, and the next
// eight. The product of two leaves the product of the low parts out, 2^-16 of it.
template <class E> constexpr int PARTS = 2;
template <> constexpr int PARTS<bfloat16> = 1;

// Steps of 32 dims, and the bytes of one part of all 128 tokens: as tiles [strip][32 dims], and as tiles of 16 dims with
// pairs of tokens along the sum.
INLINE int64_t steps_of(int64_t dims) { return (dims + 31) / 32; }
INLINE int64_t lanes_bytes(int64_t dims) { return steps_of(dims) * 64 * MAX_BLOCK; }
INLINE int64_t pairs_bytes(int64_t dims) { return round16(dims) * 2 * MAX_BLOCK; }

// Where the tiles of an operand are, in bytes: row after row, tile after tile across the product and along its sum, and
// from the high parts of numbers to the low ones.
struct AmxTilesAt {
    char *x;
    int64_t row, across, along, part = 0;
};

// M by N tiles of C, + 0 or what is there, plus A * B over so many tiles: of each part, each tile is loaded once.
template <int M, int N, bool ADD, int SPLIT> INLINE void multiply_square(AmxTilesAt a, AmxTilesAt b, AmxTilesAt c, int count) {
    if (ADD) {
        amx_load<0>(c.x, c.row);
        if (N == 2) amx_load<1>(c.x + c.along, c.row);
        if (M == 2) amx_load<2>(c.x + c.across, c.row);
        if (M == 2 && N == 2) amx_load<3>(c.x + c.across + c.along, c.row);
    } else {
        amx_zero<0>();
        if (N == 2) amx_zero<1>();
        if (M == 2) amx_zero<2>();
        if (M == 2 && N == 2) amx_zero<3>();
    }
    const auto add = [&](const char *x, const char *y) INLINE_LAMBDA {
        amx_load<4>(x, a.row);
        amx_load<6>(y, b.row);
        amx_dot<0, 4, 6>();
        if (N == 2) amx_load<7>(y + b.across, b.row), amx_dot<1, 4, 7>();
        if (M == 2) amx_load<5>(x + a.across, a.row), amx_dot<2, 5, 6>();
        if (M == 2 && N == 2) amx_dot<3, 5, 7>();
    };
    for (int k = 0; k < count; k++, a.x += a.along, b.x += b.along) {
        add(a.x, b.x);
        if (SPLIT == 2) add(a.x, b.x + b.part), add(a.x + a.part, b.x);
    }
    amx_store<0>(c.x, c.row);
    if (N == 2) amx_store<1>(c.x + c.along, c.row);
    if (M == 2) amx_store<2>(c.x + c.across, c.row);
    if (M == 2 && N == 2) amx_store<3>(c.x + c.across + c.along, c.row);
}

// `rows` tiles of C by N, two and two, of numbers in SPLIT parts.
template <int N, bool ADD, int SPLIT> INLINE void multiply_rows(AmxTilesAt a, AmxTilesAt b, AmxTilesAt c, int rows, int count) {
    for (; rows >= 2; rows -= 2, a.x += 2 * a.across, c.x += 2 * c.across)
        multiply_square<2, N, ADD, SPLIT>(a, b, c, count);
    if (rows) multiply_square<1, N, ADD, SPLIT>(a, b, c, count);
}

// A row of C in register R. A's tiles take turns in registers A and A + 1. B's are in 0 and up, as many as COUNT.
template <int R, int A, int COUNT, bool ADD>
INLINE void multiply_row(const char *a, int64_t row, int64_t along, char *c, int64_t c_row) {
    if (ADD) amx_load<R>(c, c_row);
    else amx_zero<R>();
    amx_load<A>(a, row), amx_dot<R, A, 0>();
    if constexpr (COUNT > 1) amx_load<A + 1>(a + along, row), amx_dot<R, A + 1, 1>();
    if constexpr (COUNT > 2) amx_load<A>(a + 2 * along, row), amx_dot<R, A, 2>();
    if constexpr (COUNT > 3) amx_load<A + 1>(a + 3 * along, row), amx_dot<R, A + 1, 3>();
    amx_store<R>(c, c_row);
}

// The same product for one column of tiles and a sum over at most four. A register that was stored must not be needed
// again at once, so rows of C take turns in those that are left.
template <int COUNT, bool ADD> INLINE void multiply_strip(AmxTilesAt a, AmxTilesAt b, AmxTilesAt c, int rows) {
    constexpr int A = COUNT > 2 ? 4 : 2;
    amx_load<0>(b.x, b.row);
    if (COUNT > 1) amx_load<1>(b.x + b.along, b.row);
    if (COUNT > 2) amx_load<2>(b.x + 2 * b.along, b.row);
    if (COUNT > 3) amx_load<3>(b.x + 3 * b.along, b.row);
    for (; rows > 0; rows -= 6 - A) {
        const auto multiply = [&](auto r) INLINE_LAMBDA {
            multiply_row<decltype(r)::value, A, COUNT, ADD>(a.x, a.row, a.along, c.x, c.row);
            a.x += a.across, c.x += c.across;
        };
        if constexpr (A == 2) {
            multiply(Constant<4>{});
            if (rows > 1) multiply(Constant<5>{});
            if (rows > 2) multiply(Constant<6>{});
            if (rows > 3) multiply(Constant<7>{});
        } else {
            multiply(Constant<6>{});
            if (rows > 1) multiply(Constant<7>{});
        }
    }
}

// 2^x for x up to 0 and what rounding adds to it, to 4e-6. It is exact at whole numbers, from both sides: so the largest
// weight of a row is 1, and its sum and its weights in bfloat16 agree.
INLINE __m512 exp2_of_score(__m512 x) {
    // Unmasked, GCC 12 warns of an operand that its own header leaves unset.
    const __m512 f = _mm512_maskz_reduce_ps(0xffff, x, _MM_FROUND_TO_NEG_INF);
    __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(0.0135557471f), f, _mm512_set1_ps(0.0520323693f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.241379763f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.693032121f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
    return _mm512_maskz_scalef_ps(0xffff, p, x);
}

// The same, as exactly as numbers in two parts need it.
template <class E> INLINE __m512 exp2_of(__m512 x) {
    if constexpr (PARTS<E> == 1) return exp2_of_score(x);
    else return (__m512)exp2<float>((Vec<float>)x);
}

// Two vectors to bfloat16 pairs, ties away from zero.
INLINE __m512i pairs_of(__m512 first, __m512 second) {
    const __m512i half = _mm512_set1_epi32(0x8000);
    const __m512i low = _mm512_add_epi32(_mm512_castps_si512(first), half);
    const __m512i high = _mm512_add_epi32(_mm512_castps_si512(second), half);
    return _mm512_mask_blend_epi16(0xaaaaaaaa, (__m512i)((Unsigned)low >> 16), high);
}

// The first `count` of up to 32 numbers, and zeros.
INLINE __m512i load_numbers(const bfloat16 *x, int64_t count) {
    return _mm512_maskz_loadu_epi16(count >= 32 ? 0xffffffff : count > 0 ? (1u << count) - 1 : 0, x);
}

// True if tiles can read rows in place: whole ones of 32 dims, 16 of them. Each group of queries reads all again, and
// rows that are a multiple of 512 bytes apart, as in tensors with tokens before heads, would share a few sets of the
// first cache.
INLINE bool in_place(Rows<bfloat16> rows, int64_t dims, int count) {
    const bool spread = rows.step == dims || rows.step % 256 != 0;
    return dims % 32 == 0 && count % AMX_SIDE == 0 && spread;
}

// The first `count` of up to 16 numbers, and zeros.
INLINE __m512 load_floats(const float *x, int64_t count) {
    return _mm512_maskz_loadu_ps(count >= 16 ? 0xffff : count > 0 ? (1u << count) - 1 : 0, x);
}
INLINE __m512 load_floats(const float16 *x, int64_t count) {
    const __mmask16 alive = (__mmask16)(count >= 16 ? 0xffff : count > 0 ? (1u << count) - 1 : 0);
    return _mm512_maskz_cvtph_ps(0xffff, _mm256_maskz_loadu_epi16(alive, x));
}

struct Parts {
    __m512i high, low;
};

// The parts of two vectors, each as 32 numbers, those of `first` before the others.
INLINE Parts parts_of(__m512 first, __m512 second) {
    const __m512i high = narrowed(first, second);
    const auto rest = [](__m512 x, __m256i part) INLINE_LAMBDA {
        const Unsigned bits = (Unsigned)_mm512_maskz_cvtepu16_epi32(0xffff, part);
        return _mm512_sub_ps(x, (__m512)(bits << 16));
    };
    // Masked, for GCC 12 warns of the operand that its own header leaves unset.
    const __m256i begin = _mm512_maskz_extracti64x4_epi64(0xf, high, 0);
    const __m256i end = _mm512_maskz_extracti64x4_epi64(0xf, high, 1);
    return {high, narrowed(rest(first, begin), rest(second, end))};
}

// Copy rows of tiles, with zeros in dims and rows that do not exist. Low parts follow the high ones of MAX_BLOCK rows.
template <class E> INLINE Rows<bfloat16> copy_rows(Rows<E> rows, int count, int64_t dims, bfloat16 *to) {
    const int64_t width = 32 * steps_of(dims);
    for (int k = 0; k < (count + AMX_SIDE - 1) / AMX_SIDE * AMX_SIDE; k++)
        for (int64_t d = 0; d < width; d += 32) {
            const int64_t left = k < count ? dims - d : 0;
            const E *x = rows.row(left > 0 ? k : 0) + (left > 0 ? d : 0);
            bfloat16 *y = to + k * width + d;
            if constexpr (PARTS<E> == 1) {
                _mm512_store_si512(y, load_numbers(x, left));
            } else {
                const Parts parts = parts_of(load_floats(x, left), load_floats(x + min(16, left), left - 16));
                _mm512_store_si512(y, parts.high);
                _mm512_store_si512(y + MAX_BLOCK * width, parts.low);
            }
        }
    return {to, width};
}

INLINE Rows<bfloat16> part_of(Rows<bfloat16> rows, int part) {
    return {rows.x + part * MAX_BLOCK * rows.step, rows.step};
}

// Side in the columns and pairs of dims along the sum: tiles [strip][32 dims] of the lanes [from, to), zeros in
// those that are not inside. The first row is that of lane `low`.
template <class F>
INLINE void pack_lanes(Rows<bfloat16> rows, int low, int from, int to, int64_t dims, short flip, F inside, char *tile) {
    for (int lane = from; lane < to; lane += AMX_SIDE)
        for (int64_t d = 0; d < dims; d += 32, tile += AMX_BYTES) {
            Vec<float> x[AMX_SIDE];
            for (int i = 0; i < AMX_SIDE; i++) {
                const bool alive = inside(lane + i);
                const bfloat16 *at = rows.x + (alive ? (lane + i - low) * rows.step + d : 0);
                x[i] = (Vec<float>)_mm512_xor_si512(load_numbers(at, alive ? dims - d : 0), _mm512_set1_epi16(flip));
            }
            transpose_square<float>(x);
            for (int i = 0; i < AMX_SIDE; i++) store((float *)tile + i * AMX_SIDE, x[i]);
        }
}

// 32 dims of 32 keys from rows, to one or two tiles.
template <class F> INLINE void pack_square(float *tile, int64_t dims, F row) {
    Vec<float> low[AMX_SIDE], high[AMX_SIDE];
#pragma GCC unroll 16
    for (int i = 0; i < AMX_SIDE; i++) {
        const __m512i a = row(2 * i), b = row(2 * i + 1);
        low[i] = (Vec<float>)_mm512_maskz_unpacklo_epi16(~0u, a, b);
        high[i] = (Vec<float>)_mm512_maskz_unpackhi_epi16(~0u, a, b);
    }
    transpose_square<float>(low);
    transpose_square<float>(high);
#pragma GCC unroll 16
    for (int i = 0; i < AMX_SIDE; i++) {
        // Interleaving within 128 bits has put dims 0-3, 8-11 and so on into `low`, the others into `high`.
        const int d = i / 4 * 8 + i % 4;
        float *to = tile + d / AMX_SIDE * KEY_TILES * AMX_NUMBERS + d % AMX_SIDE * AMX_SIDE;
        if (d >= AMX_SIDE && dims <= AMX_SIDE) continue;
        store(to, low[i]);
        store(to + 4 * AMX_SIDE, high[i]);
    }
}

// Dims in the rows and pairs of keys along the sum: tiles [16 dims][32 keys]. Keys past the last one and keys in
// `unused` become zeros, because 0 * NaN would be NaN.
INLINE void pack_transpose(Rows<bfloat16> rows, int count, int64_t dims, const uint32_t *unused, char *tiles) {
    for (int k = 0; k < count; k += AMX_KEYS) {
        uint32_t lives = count - k >= AMX_KEYS ? ~0u : (1u << (count - k)) - 1;
        if (unused) lives &= ~unused[k / AMX_KEYS];
        const Rows<bfloat16> block = {rows.row(k), rows.step};
        for (int64_t d = 0; d < dims; d += 32) {
            float *tile = (float *)(tiles + (d / AMX_SIDE * KEY_TILES + k / AMX_KEYS) * AMX_BYTES);
            if (lives == ~0u && dims - d >= 32)
                pack_square(tile, 32, [&](int i) INLINE_LAMBDA { return _mm512_loadu_si512(block.row(i) + d); });
            else
                pack_square(tile, dims - d, [&](int i) INLINE_LAMBDA {
                    const bool alive = lives >> i & 1;
                    return load_numbers(block.row(alive ? i : 0) + d, alive ? dims - d : 0);
                });
        }
    }
}

// By key, the lanes that keep it: of the up to 32 lanes from `lane` on, those `inside`. And the keys that are kept.
INLINE Reach keys_of_lanes(const Mask &mask, int lane, uint32_t inside, int count, uint32_t *kept) {
    const __m512i key = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i row = _mm512_mullo_epi32(key, _mm512_set1_epi32(mask.words));
    Reach found = {count, 0};
    for (int k = 0; k < count; k += AMX_SIDE) {
        __mmask16 lives = (__mmask16)((1u << min(AMX_SIDE, count - k)) - 1);
        if (mask.unused) lives &= (__mmask16) ~(mask.unused[k >> 5] >> (k & 31));
        __m512i words = _mm512_maskz_set1_epi32(lives, (int)inside);
        if (mask.bits) {
            const int32_t *bits = mask.bits + k * mask.words + (lane >> 5);
            words = _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), lives, row, bits, 4);
            words = (__m512i)((Unsigned)words >> (lane & 31) & inside);
        }
        _mm512_storeu_si512(kept + k, words);
        const uint32_t any = _mm512_test_epi32_mask(words, words);
        if (!any) continue;
        if (found.first > k) found.first = k + __builtin_ctz(any);
        found.last = k + 32 - __builtin_clz(any);
    }
    return found;
}

// The policy (see products.h): 16 * STRIPS queries are multiplied together. One strip keeps its queries in registers, so
// their head dim is 64 at most. Two halve the loads of keys and values.
template <class E, int STRIPS> struct AmxProducts {
    using Element = E;
    using Number = float;
    using Unit = AmxUnit;
    static constexpr int KEY_STEP = AMX_SIDE, LANES = STRIPS * AMX_SIDE, LANE_STEP = LANES;
    static constexpr int SPLIT = PARTS<E>, SCORE_ROW = 4 * LANES, WEIGHT_STEP = STRIPS * AMX_BYTES;
    static constexpr int64_t WEIGHT_PART = KEY_TILES * WEIGHT_STEP;
    static_assert(SPLIT == 1 || STRIPS == 2);

    const ringtile_call &c;
    const int steps, value_tiles;             // of 32 head dims, and of 16 value dims
    const int64_t query_part, value_part;  // bytes from high parts to low ones
    // TileCursor: queries [strip][step], weights [32 keys][strip], values [16 dims][32 keys].
    char *queries, *weights, *values;
    bfloat16 *copy;
    Rows<bfloat16> keys;
    // Of the group of lanes: the lanes that keep each key, and whether they keep all of them.
    uint32_t kept[MAX_BLOCK];
    bool keeps_all;

    // Keys take the place of values and queries that were split before them.
    static int64_t copied_steps(const ringtile_call &c) {
        return SPLIT == 1 ? steps_of(c.head_dim) : max(steps_of(c.head_dim), steps_of(c.value_dim));
    }
    static int64_t size(const ringtile_call &c) {
        const int64_t steps = steps_of(c.head_dim) + copied_steps(c);
        return SPLIT * ((16 * steps + round16(c.value_dim) / 2) * MAX_BLOCK + WEIGHT_PART / 4);
    }

    AmxProducts(const ringtile_call &call, float *memory)
        : c(call), steps((int)steps_of(c.head_dim)), value_tiles((int)round16(c.value_dim) / AMX_SIDE),
          query_part(lanes_bytes(c.head_dim)), value_part(pairs_bytes(c.value_dim)), keys(), keeps_all() {
        queries = (char *)memory;
        copy = (bfloat16 *)(queries + SPLIT * query_part);
        weights = (char *)(copy + SPLIT * 32 * copied_steps(c) * MAX_BLOCK);
        values = weights + SPLIT * WEIGHT_PART;
    }

    INLINE void pack_queries(const Head &head, Side tokens, int from, int to, float sign) {
        Packing packing(c);
        const Rows<bfloat16> rows = split(query_rows<E>(c, head, tokens), tokens.high - tokens.low, c.head_dim);
        const auto inside = [&](int lane) INLINE_LAMBDA {
            return sign != 0 && lane >= tokens.low && lane < tokens.high;
        };
        for (int part = 0; part < SPLIT; part++)
            pack_lanes(part_of(rows, part), tokens.low, from, to, c.head_dim, sign < 0 ? (short)0x8000 : 0, inside,
                       queries + part * query_part);
    }

    INLINE void load_tile(const Head &head, Side tokens, const uint32_t *unused) {
        Packing packing(c);
        const Rows<bfloat16> rows = split(value_rows<E>(c, head, tokens), tokens.high, c.value_dim);
        for (int part = 0; part < SPLIT; part++)
            pack_transpose(part_of(rows, part), tokens.high, c.value_dim, unused, values + part * value_part);
        keys = split(key_rows<E>(c, head, tokens), tokens.high, c.head_dim);
        if (SPLIT == 1 && !in_place(keys, c.head_dim, tokens.high)) keys = copy_rows(keys, tokens.high, c.head_dim, copy);
    }

    // Rows of bfloat16 where they are, others in parts.
    template <class X> INLINE Rows<bfloat16> split(Rows<X> rows, int count, int64_t dims) {
        if constexpr (SPLIT == 1) return rows;
        else return copy_rows(rows, count, dims, copy);
    }

    // The keys that a group of lanes needs, and by key the lanes that need it.
    INLINE Reach reach(const Mask &mask, Side queries, Side keys, int lane) {
        keeps_all = !mask.partial();
        if (keeps_all) return {0, keys.high};
        const int low = (int)max(0, queries.low - lane), high = (int)min(LANES, queries.high - lane);
        const uint32_t inside = (uint32_t)(((uint64_t)1 << high) - ((uint64_t)1 << low));
        return keys_of_lanes(mask, lane, inside, keys.high, kept);
    }

    INLINE void scores(int vectors, int offset, int first, int count, float *scores) {
        const AmxTilesAt a = {(char *)keys.row(first), 2 * keys.step, AMX_SIDE * 2 * keys.step, 64,
                           2 * MAX_BLOCK * keys.step};
        char *const packed = queries + offset / AMX_SIDE * steps * AMX_BYTES;
        const AmxTilesAt b = {packed, 64, steps * AMX_BYTES, AMX_BYTES, query_part};
        const AmxTilesAt to = {(char *)scores, SCORE_ROW, AMX_SIDE * SCORE_ROW, 64};
        const int rows = (count + AMX_SIDE - 1) / AMX_SIDE;
        if (STRIPS == 2 && vectors == 2) multiply_rows<2, false, SPLIT>(a, b, to, rows, steps);
        else if (STRIPS == 2) multiply_rows<1, false, SPLIT>(a, b, to, rows, steps);
        else if (steps == 1) multiply_strip<1, false>(a, b, to, rows);
        else multiply_strip<2, false>(a, b, to, rows);
    }

    INLINE void weigh(int vectors, const float *scores, int first, int count, int lane, float base, const Mask &,
                      const uint32_t (*keep)[MAX_WORDS], Softmax<float> softmax) {
        const bool ahead = STRIPS == 1 && value_tiles == 4;
        for (int k = 0; keep && keeps_all && k < count; k++) kept[first + k] = ~0u;
        for (int n = 0; n < vectors; n++) {
            const int at = lane + n * AMX_SIDE;
            if (keep) weigh_strip<true, true, false>(scores, n, first, count, at, base, keep, softmax);
            else if (!keeps_all) weigh_strip<true, false, false>(scores, n, first, count, at, base, keep, softmax);
            else if (ahead) weigh_strip<false, false, true>(scores, n, first, count, at, base, keep, softmax);
            else weigh_strip<false, false, false>(scores, n, first, count, at, base, keep, softmax);
        }
    }

    // The step of the online softmax for a strip: weights go to pairs of keys. Where AHEAD, what the next products read
    // is brought into the first cache meanwhile: the tiles of values and the sums.
    template <bool MASKED, bool DROPS, bool AHEAD>
    void weigh_strip(const float *scores, int n, int first, int count, int lane, float base,
                     const uint32_t (*keep)[MAX_WORDS], Softmax<float> softmax) {
        const __m512 low = _mm512_set1_ps(-infinity<float>()), factor = _mm512_set1_ps(base);
        const float *column = scores + n * AMX_SIDE;
        const auto score = [&](int k) INLINE_LAMBDA { return _mm512_load_ps(column + k * LANES); };
        const auto lanes = [&](int k) INLINE_LAMBDA { return (__mmask16)(kept[first + k] >> n * AMX_SIDE); };
        __m512 top[8];
        for (__m512 &x : top) x = low;
        const auto raise = [&](int i, int k) INLINE_LAMBDA {
            top[i] = MASKED ? _mm512_mask_max_ps(top[i], lanes(k), top[i], score(k))
                            : _mm512_maskz_max_ps(0xffff, top[i], score(k));
        };
        int k = 0;
        for (; k + 8 <= count; k += 8)
#pragma GCC unroll 8
            for (int i = 0; i < 8; i++) raise(i, k + i);
        for (; k < count; k++) raise(0, k);
        for (int half = 4; half; half /= 2)
            for (int i = 0; i < half; i++) top[i] = _mm512_maskz_max_ps(0xffff, top[i], top[i + half]);

        float *highest = softmax.highest + lane, *total = softmax.total + lane, *sums = softmax.sums + lane;
        const __m512 before = _mm512_load_ps(highest);
        const __m512 now = _mm512_maskz_max_ps(0xffff, before, top[0]);
        const __m512 safe = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(now, low, _CMP_NEQ_UQ), now);
        // Exactly, because errors of shares would add up in the lse.
        const __m512 share = (__m512)exp2<float>((Vec<float>)_mm512_mul_ps(_mm512_sub_ps(before, safe), factor));
        _mm512_store_ps(highest, now);
        if (_mm512_cmp_ps_mask(now, before, _CMP_NLE_UQ))
            for (int64_t d = 0; d < c.value_dim; d++)
                _mm512_store_ps(sums + d * MAX_BLOCK, _mm512_mul_ps(_mm512_load_ps(sums + d * MAX_BLOCK), share));

        __m512 sum[4] = {_mm512_mul_ps(_mm512_load_ps(total), share), {}, {}, {}};
        const auto weight = [&](int k, __m512 &sum) INLINE_LAMBDA {
            __m512 p = exp2_of<E>(_mm512_mul_ps(_mm512_sub_ps(score(k), safe), factor));
            if (MASKED) p = _mm512_maskz_mov_ps(lanes(k), p);
            sum = _mm512_add_ps(sum, p);
            if (DROPS) p = _mm512_maskz_mov_ps((__mmask16)(keep[first + k][lane >> 5] >> (lane & 31)), p);
            return p;
        };
        const auto pairs_at = [&](uint32_t pair) INLINE_LAMBDA {
            return weights + pair / AMX_SIDE * WEIGHT_STEP + n * AMX_BYTES + pair % AMX_SIDE * 64;
        };
        const auto put = [&](uint32_t pair, __m512 even, __m512 odd) INLINE_LAMBDA {
            const __m512i high = pairs_of(even, odd);
            _mm512_store_si512(pairs_at(pair), high);
            if (SPLIT == 1) return;
            even = _mm512_sub_ps(even, (__m512)((Unsigned)high << 16));
            odd = _mm512_sub_ps(odd, (__m512)((Unsigned)high & 0xffff0000));
            _mm512_store_si512(pairs_at(pair) + WEIGHT_PART, pairs_of(even, odd));
        };
        const auto clear = [&](uint32_t pair) INLINE_LAMBDA {
            for (int part = 0; part < SPLIT; part++)
                _mm512_store_si512(pairs_at(pair) + part * WEIGHT_PART, _mm512_setzero_si512());
        };
        uint32_t pair = (uint32_t)first / 2;
        for (uint32_t begin = pair / AMX_SIDE * AMX_SIDE; begin < pair; begin++) clear(begin);
        for (k = 0; k + 4 <= count; k += 4)
#pragma GCC unroll 2
            for (int i = 0; i < 2; i++, pair++) {
                const __m512 even = weight(k + 2 * i, sum[2 * i]), odd = weight(k + 2 * i + 1, sum[2 * i + 1]);
                put(pair, even, odd);
                if (!AHEAD) continue;
                const char *row = values + pair / AMX_SIDE * AMX_BYTES + pair % AMX_SIDE * 64;
#pragma GCC unroll 4
                for (int tile = 0; tile < 4; tile++) _mm_prefetch(row + tile * KEY_TILES * AMX_BYTES, _MM_HINT_T0);
                _mm_prefetch((const char *)(sums + pair * MAX_BLOCK), _MM_HINT_T0);
            }
        for (; k < count; k += 2, pair++) {
            const __m512 even = weight(k, sum[0]);
            const __m512 odd = k + 1 < count ? weight(k + 1, sum[1]) : _mm512_setzero_ps();
            put(pair, even, odd);
        }
        for (; pair % AMX_SIDE; pair++) clear(pair);
        _mm512_store_ps(total, _mm512_add_ps(_mm512_add_ps(sum[0], sum[1]), _mm512_add_ps(sum[2], sum[3])));
    }

    INLINE void add_values(int vectors, int first, int count, const float *, float *sums, Ahead) {
        const int begin = first / AMX_KEYS, tiles = (first + count + AMX_KEYS - 1) / AMX_KEYS - begin;
        const AmxTilesAt a = {values + begin * AMX_BYTES, 64, KEY_TILES * AMX_BYTES, AMX_BYTES, value_part};
        const AmxTilesAt b = {weights + begin * WEIGHT_STEP, 64, AMX_BYTES, WEIGHT_STEP, WEIGHT_PART};
        const AmxTilesAt to = {(char *)sums, 4 * MAX_BLOCK, AMX_SIDE * 4 * MAX_BLOCK, 64};
        if (STRIPS == 2 && vectors == 2) return multiply_rows<2, true, SPLIT>(a, b, to, value_tiles, tiles);
        if (STRIPS == 2) return multiply_rows<1, true, SPLIT>(a, b, to, value_tiles, tiles);
        with_constant<4>(tiles, [&](auto count) INLINE_LAMBDA {
            multiply_strip<decltype(count)::value, true>(a, b, to, value_tiles);
        });
    }
};

}  // namespace ISA
