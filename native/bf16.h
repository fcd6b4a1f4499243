// Dot products of bfloat16 pairs (AVX512-BF16): operands in pairs along the sum, results in float.
#pragma once
#include "products.h"

#if defined(__AVX512BF16__)
#define HAS_BF16_PAIRS 1

namespace ISA {

// An A of pairs: each is contiguous, and so are the pairs of a row (or of a column). B holds a pair in each lane.
template <> struct Factors<bfloat16> {
    using B = uint32_t;
    using Sum = float;
    static constexpr int PER = 2;

    INLINE static __m512bh of_a(const bfloat16 *a) {
        int32_t pair;
        __builtin_memcpy(&pair, a, 4);
        return (__m512bh)_mm512_set1_epi32(pair);
    }
    INLINE static __m512bh of_b(const uint32_t *b) { return (__m512bh)_mm512_loadu_si512(b); }
    INLINE static Vec<float> add_product(Vec<float> sum, __m512bh a, __m512bh b) {
        return (Vec<float>)_mm512_dpbf16_ps((__m512)sum, a, b);
    }
};

// Queries in the lanes, dims 2 d and 2 d + 1 of each as a pair, laid out as by transpose_in.
INLINE void interleave_queries(Rows<bfloat16> rows, int low, int high, int from, int to, int64_t width, float sign,
                               uint32_t *y) {
    const __m512i flip = _mm512_set1_epi32(sign < 0 ? (int)0x80008000u : 0);
    for (int lane = from; lane < to; lane += 16) {
        uint32_t *column =
            y + (lane - from) / GROUP<float> * GROUP<float> * (width / 2) + (lane - from) % GROUP<float>;
        for (int64_t d = 0; d < width / 2; d += 16) {
            Vec<float> x[16];
            int count = (int)min(16, width / 2 - d);
            for (int i = 0; i < 16; i++) {
                int token = lane + i;
                __mmask16 inside = sign != 0 && token >= low && token < high ? (1u << count) - 1 : 0;
                const bfloat16 *pairs = rows.x + (token - low) * rows.step + 2 * d;
                x[i] = (Vec<float>)_mm512_maskz_xor_epi32(inside, _mm512_maskz_loadu_epi32(inside, pairs), flip);
            }
            transpose_square<float>(x);
            for (int i = 0; i < count; i++) store((float *)(column + (d + i) * GROUP<float>), x[i]);
        }
    }
}

// Rows 2 k and 2 k + 1 interleaved. Rows whose bit in `unused` is set become zeros, and so does one past the last.
INLINE void interleave_rows(Rows<bfloat16> rows, int count, int64_t width, const uint32_t *unused, bfloat16 *y) {
    for (int k = 0; k < count; k += 2) {
        const bool first = !(unused && bit(unused, k)), second = k + 1 < count && !(unused && bit(unused, k + 1));
        for (int64_t d = 0; d < width; d += 16) {
            const __mmask16 inside = width - d < 16 ? (1u << (width - d)) - 1 : 0xffff;
            const __m256i low = _mm256_maskz_loadu_epi16(first ? inside : 0, rows.row(k) + d);
            const __m256i high = _mm256_maskz_loadu_epi16(second ? inside : 0, rows.row(k + 1) + d);
            const __m512i pairs = _mm512_maskz_slli_epi32(inside, _mm512_maskz_cvtepu16_epi32(inside, high), 16);
            _mm512_mask_storeu_epi32(y + k * width + 2 * d, inside, _mm512_maskz_cvtepu16_epi32(inside, low) | pairs);
        }
    }
}

// Weights [count][step] rounded to bfloat16, rows 2 k and 2 k + 1 as pairs.
INLINE void interleave_weights(const float *weights, int64_t step, int count, int vectors, uint32_t *y) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    for (int k = 0; k < count; k += 2)
        for (int n = 0; n < vectors; n++) {
            __m512 first = _mm512_loadu_ps(weights + k * step + n * 16);
            __m512 second = k + 1 < count ? _mm512_loadu_ps(weights + (k + 1) * step + n * 16) : _mm512_setzero_ps();
            __m512i both = (__m512i)_mm512_cvtne2ps_pbh(second, first);
            _mm512_storeu_si512(y + k / 2 * step + n * 16, _mm512_permutexvar_epi16(order, both));
        }
}

// The policy (see products.h): keys are read in place, queries, weights and values are interleaved. D must be even.
struct Bf16Pairs : VectorWeights<float> {
    using Element = bfloat16;
    using Number = float;
    static constexpr int KEY_STEP = 2;

    const ringtile_call &c;
    uint32_t *queries, *weights;
    bfloat16 *values;
    Rows<bfloat16> keys;

    static int64_t size(const ringtile_call &c) {
        return (c.head_dim + GROUP<float> + c.value_dim) / 2 * MAX_BLOCK + MAX_BLOCK;
    }

    Bf16Pairs(const ringtile_call &call, float *memory) : c(call), keys() {
        queries = (uint32_t *)memory;
        weights = queries + c.head_dim / 2 * MAX_BLOCK;
        values = (bfloat16 *)(weights + GROUP<float> / 2 * MAX_BLOCK);
    }

    INLINE void pack_queries(const Head &head, Side tokens, int from, int to, float sign) {
        Packing packing(c);
        pack(query_rows<bfloat16>(c, head, tokens), tokens, from, to, sign);
    }
    INLINE void pack(Rows<bfloat16> rows, Side tokens, int from, int to, float sign) {
        interleave_queries(rows, tokens.low, tokens.high, from, to, c.head_dim, sign, queries);
    }

    INLINE void load_tile(const Head &head, Side tokens, const uint32_t *unused) {
        Packing packing(c);
        keys = key_rows<bfloat16>(c, head, tokens);
        interleave_rows(value_rows<bfloat16>(c, head, tokens), tokens.high, c.value_dim, unused, values);
    }

    INLINE void scores(int vectors, int offset, int first, int count, float *scores) {
        matmul<bfloat16, true>(vectors, keys.row(first), keys.step, queries + offset * (c.head_dim / 2),
                         GROUP<float>, scores, GROUP<float>, count, c.head_dim / 2, false);
    }

    INLINE void add_values(int vectors, int first, int count, const float *from, float *sums, Ahead ahead) {
        interleave_weights(from, GROUP<float>, count, vectors, weights);
        matmul<bfloat16, false>(vectors, values + first * c.value_dim, 2 * c.value_dim, weights, GROUP<float>, sums, MAX_BLOCK,
                          c.value_dim, (count + 1) / 2, true, ahead);
    }
};

}  // namespace ISA
#else
#define HAS_BF16_PAIRS 0
#endif
