// Products of bfloat16 numbers, two at a time (AVX512-BF16): operands in pairs along the sum, results in float.
#pragma once
#include "matmul.h"
#include "tile.h"

#if defined(__AVX512BF16__)
#define HAS_PAIRS 1
#else
#define HAS_PAIRS 0
#endif

namespace ISA {
#if HAS_PAIRS

// A_ROWS: pairs are neighbours in A's rows, a_step apart; else row k of A holds the pairs of all m. B holds a pair in
// each lane.
template <int M, int N, bool A_ROWS>
INLINE void pair_tile(const bfloat16 *a, int64_t a_step, const uint32_t *b, int64_t b_k, float *c, int64_t c_m,
                      int64_t pairs, bool add) {
    __m512 sum[M][N];
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++) sum[m][n] = _mm512_setzero_ps();
    for (int64_t k = 0; k < pairs; k++) {
        __m512bh row[N];
        for (int n = 0; n < N; n++) row[n] = (__m512bh)_mm512_loadu_si512(b + k * b_k + n * 16);
        for (int m = 0; m < M; m++) {
            int32_t pair;
            __builtin_memcpy(&pair, a + (A_ROWS ? m * a_step + 2 * k : k * a_step + 2 * m), 4);
            __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
            for (int n = 0; n < N; n++) sum[m][n] = _mm512_dpbf16_ps(sum[m][n], both, row[n]);
        }
    }
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++) {
            float *at = c + m * c_m + n * 16;
            _mm512_storeu_ps(at, add ? _mm512_add_ps(_mm512_loadu_ps(at), sum[m][n]) : sum[m][n]);
        }
}

template <int N, bool A_ROWS>
void pair_columns(const bfloat16 *a, int64_t a_step, const uint32_t *b, int64_t b_k, float *c, int64_t c_m,
                  int64_t rows, int64_t pairs, bool add) {
    const int64_t a_m = A_ROWS ? a_step : 2;
    int64_t m = 0;
    for (; m + TILE_ROWS <= rows; m += TILE_ROWS)
        pair_tile<TILE_ROWS, N, A_ROWS>(a + m * a_m, a_step, b, b_k, c + m * c_m, c_m, pairs, add);
    a += m * a_m;
    c += m * c_m;
    switch (rows - m) {
    case 5: pair_tile<5, N, A_ROWS>(a, a_step, b, b_k, c, c_m, pairs, add); break;
    case 4: pair_tile<4, N, A_ROWS>(a, a_step, b, b_k, c, c_m, pairs, add); break;
    case 3: pair_tile<3, N, A_ROWS>(a, a_step, b, b_k, c, c_m, pairs, add); break;
    case 2: pair_tile<2, N, A_ROWS>(a, a_step, b, b_k, c, c_m, pairs, add); break;
    case 1: pair_tile<1, N, A_ROWS>(a, a_step, b, b_k, c, c_m, pairs, add); break;
    default: break;
    }
}

template <bool A_ROWS>
INLINE void pair_matmul(int vectors, const bfloat16 *a, int64_t a_step, const uint32_t *b, int64_t b_k, float *c,
                        int64_t c_m, int64_t rows, int64_t pairs, bool add) {
    switch (vectors) {
    case 1: pair_columns<1, A_ROWS>(a, a_step, b, b_k, c, c_m, rows, pairs, add); break;
    case 2: pair_columns<2, A_ROWS>(a, a_step, b, b_k, c, c_m, rows, pairs, add); break;
    case 3: pair_columns<3, A_ROWS>(a, a_step, b, b_k, c, c_m, rows, pairs, add); break;
    default: pair_columns<4, A_ROWS>(a, a_step, b, b_k, c, c_m, rows, pairs, add); break;
    }
}

// Queries in the lanes, the pair (2 d, 2 d + 1) of each, laid out as by transpose_in; zero in the lanes of [from, to)
// that hold none.
INLINE void pair_queries(Rows<bfloat16> rows, int low, int high, int from, int to, int64_t width, float sign,
                         uint32_t *y) {
    constexpr int GROUP = TILE_VECTORS * 16;
    const __m512i flip = _mm512_set1_epi32(sign < 0 ? (int)0x80008000u : 0);
    for (int lane = from; lane < to; lane += 16) {
        uint32_t *column = y + (lane - from) / GROUP * GROUP * (width / 2) + (lane - from) % GROUP;
        for (int64_t d = 0; d < width / 2; d += 16) {
            Vec<float> x[16];
            int count = (int)least(16, width / 2 - d);
            for (int i = 0; i < 16; i++) {
                int token = lane + i;
                __mmask16 inside = sign != 0 && token >= low && token < high ? (1u << count) - 1 : 0;
                const bfloat16 *pairs = rows.x + (token - low) * rows.step + 2 * d;
                x[i] = (Vec<float>)_mm512_maskz_xor_epi32(inside, _mm512_maskz_loadu_epi32(inside, pairs), flip);
            }
            transpose_square<float>(x);
            for (int i = 0; i < count; i++) store((float *)(column + (d + i) * GROUP), x[i]);
        }
    }
}

// Rows 2 k and 2 k + 1 interleaved; rows whose bit in `dead` is set, and one past the last, come as zero.
INLINE void pair_rows(Rows<bfloat16> rows, int count, int64_t width, const uint32_t *dead, bfloat16 *y) {
    static const bfloat16 nothing[1] = {};
    for (int k = 0; k < count; k += 2) {
        bool first = !(dead && (dead[k >> 5] >> (k & 31) & 1));
        bool second = k + 1 < count && !(dead && (dead[(k + 1) >> 5] >> ((k + 1) & 31) & 1));
        const bfloat16 *x0 = first ? rows.x + k * rows.step : nothing,
            *x1 = second ? rows.x + (k + 1) * rows.step : nothing;
        bfloat16 *to = y + k * width;
        if (first && second) {
            for (int64_t d = 0; d < width; d++) to[2 * d] = x0[d], to[2 * d + 1] = x1[d];
        } else {
            for (int64_t d = 0; d < width; d++)
                to[2 * d] = first ? x0[d] : bfloat16{}, to[2 * d + 1] = second ? x1[d] : bfloat16{};
        }
    }
}

// Weights [count][step] rounded to bfloat16, rows 2 k and 2 k + 1 as pairs.
INLINE void pair_weights(const float *weights, int64_t step, int count, int vectors, uint32_t *y) {
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
#endif
}  // namespace ISA
