// C[m][n] (+)= A(m, k) * B[k][n]: A is read one number at a time in place, B and C in rows of vectors. Each sum starts
// at zero and C is added at the end, so a chain of thousands of tiles rounds like a chain of a few.
#pragma once
#include "simd.h"

namespace ISA {

// Rows and vectors of a register tile, which leaves two registers for its row of B and a number of A.
#if defined(__AVX512F__)
constexpr int TILE_ROWS = 6, TILE_VECTORS = 4;
#elif defined(__AVX2__)
constexpr int TILE_ROWS = 6, TILE_VECTORS = 2;
#else
constexpr int TILE_ROWS = 6, TILE_VECTORS = 4;
#endif

// The lanes of a register tile.
template <class T> constexpr int GROUP = TILE_VECTORS * Lanes<T>::count;

template <int N> struct Constant {
    static constexpr int value = N;
};

// Calls f with `count`, from 1 to LIMIT, as a compile-time constant; any other count does nothing.
template <int LIMIT, class F> INLINE void with_constant(int64_t count, F f) {
    switch (count) {
    case 1: f(Constant<1>{}); break;
    case 2: f(Constant<2>{}); break;
    case 3: if constexpr (LIMIT >= 3) f(Constant<3>{}); break;
    case 4: if constexpr (LIMIT >= 4) f(Constant<4>{}); break;
    case 5: if constexpr (LIMIT >= 5) f(Constant<5>{}); break;
    default: break;
    }
}

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

template <class T, int N, bool A_ROWS>
void columns_matmul(const T *a, int64_t a_step, const T *b, int64_t b_k, T *c, int64_t c_m, int64_t rows, int64_t depth,
                    bool add) {
    const int64_t a_m = A_ROWS ? a_step : 1;
    for (; rows >= TILE_ROWS; rows -= TILE_ROWS, a += TILE_ROWS * a_m, c += TILE_ROWS * c_m)
        register_tile<T, TILE_ROWS, N, A_ROWS>(a, a_step, b, b_k, c, c_m, depth, add);
    with_constant<TILE_ROWS - 1>(rows, [=](auto m) INLINE_LAMBDA {
        register_tile<T, decltype(m)::value, N, A_ROWS>(a, a_step, b, b_k, c, c_m, depth, add);
    });
}

// A_ROWS: A's rows are contiguous and a_step apart; otherwise its columns are. `vectors` is the width of B and C, at
// most TILE_VECTORS.
template <class T, bool A_ROWS>
INLINE void matmul(int vectors, const T *a, int64_t a_step, const T *b, int64_t b_k, T *c, int64_t c_m, int64_t rows,
                   int64_t depth, bool add) {
    with_constant<TILE_VECTORS>(vectors, [=](auto n) INLINE_LAMBDA {
        columns_matmul<T, decltype(n)::value, A_ROWS>(a, a_step, b, b_k, c, c_m, rows, depth, add);
    });
}

}  // namespace ISA
