// C[m][n] (+)= A(m, k) * B[k][n]: A is read one number at a time wherever it lies, B and C in rows of vectors. The sum
// starts from zero and C is added when it is whole: a chain of thousands of products rounds like one of its links.
#pragma once
#include "simd.h"

namespace ISA {

// Rows and vectors of a register tile: two fewer registers than there are hold it, its row of B and a number of A.
#if defined(__AVX512F__)
constexpr int TILE_ROWS = 6, TILE_VECTORS = 4;
#elif defined(__AVX2__)
constexpr int TILE_ROWS = 6, TILE_VECTORS = 2;
#else
constexpr int TILE_ROWS = 6, TILE_VECTORS = 4;
#endif

template <class T, int M, int N, bool A_ROWS>
INLINE void register_tile(const T *a, int64_t a_step, const T *b, int64_t b_k, T *c, int64_t c_m, int64_t depth,
                          bool add) {
    constexpr int L = Lanes<T>::count;
    Vec<T> sum[M][N];
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++) sum[m][n] = Vec<T>{};
    for (int64_t k = 0; k < depth; k++) {
        Vec<T> row[N];
        for (int n = 0; n < N; n++) row[n] = load(b + k * b_k + n * L);
        for (int m = 0; m < M; m++) {
            Vec<T> number = splat<T>(a[A_ROWS ? m * a_step + k : m + k * a_step]);
            for (int n = 0; n < N; n++) sum[m][n] += number * row[n];
        }
    }
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++) {
            T *at = c + m * c_m + n * L;
            store(at, add ? load(at) + sum[m][n] : sum[m][n]);
        }
}

// A_ROWS: A's rows are contiguous, a_step apart; else its columns are.
template <class T, int N, bool A_ROWS>
void columns_matmul(const T *a, int64_t a_step, const T *b, int64_t b_k, T *c, int64_t c_m, int64_t rows, int64_t depth,
                    bool add) {
    const int64_t a_m = A_ROWS ? a_step : 1;
    int64_t m = 0;
    for (; m + TILE_ROWS <= rows; m += TILE_ROWS)
        register_tile<T, TILE_ROWS, N, A_ROWS>(a + m * a_m, a_step, b, b_k, c + m * c_m, c_m, depth, add);
    a += m * a_m;
    c += m * c_m;
    switch (rows - m) {
    case 5: register_tile<T, 5, N, A_ROWS>(a, a_step, b, b_k, c, c_m, depth, add); break;
    case 4: register_tile<T, 4, N, A_ROWS>(a, a_step, b, b_k, c, c_m, depth, add); break;
    case 3: register_tile<T, 3, N, A_ROWS>(a, a_step, b, b_k, c, c_m, depth, add); break;
    case 2: register_tile<T, 2, N, A_ROWS>(a, a_step, b, b_k, c, c_m, depth, add); break;
    case 1: register_tile<T, 1, N, A_ROWS>(a, a_step, b, b_k, c, c_m, depth, add); break;
    default: break;
    }
}

// `vectors` is the width of B and C, at most TILE_VECTORS.
template <class T, bool A_ROWS>
INLINE void matmul(int vectors, const T *a, int64_t a_step, const T *b, int64_t b_k, T *c, int64_t c_m, int64_t rows,
                   int64_t depth, bool add) {
    switch (vectors) {
    case 1: columns_matmul<T, 1, A_ROWS>(a, a_step, b, b_k, c, c_m, rows, depth, add); break;
    case 2: columns_matmul<T, 2, A_ROWS>(a, a_step, b, b_k, c, c_m, rows, depth, add); break;
#if !defined(__AVX2__) || defined(__AVX512F__)
    case 3: columns_matmul<T, 3, A_ROWS>(a, a_step, b, b_k, c, c_m, rows, depth, add); break;
    case 4: columns_matmul<T, 4, A_ROWS>(a, a_step, b, b_k, c, c_m, rows, depth, add); break;
#endif
    default: break;
    }
}

}  // namespace ISA
