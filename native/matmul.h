// C[m][n] (+)= A(m, k) * B[k][n]: A is read one number at a time in place, B and C in rows of vectors. Each sum starts
// at zero and C is added at the end, so a chain of thousands of tiles rounds like a chain of a few.
#pragma once
#include "simd.h"

namespace ISA {

// Rows and vectors of a register tile, which leaves two registers for its row of B and a number of A.
#if defined(__AVX512F__)
constexpr int MR = 6, NR = 4;
#elif defined(__AVX2__)
constexpr int MR = 6, NR = 2;
#else
constexpr int MR = 6, NR = 4;
#endif

// The lanes of a register tile.
template <class T> constexpr int GROUP = NR * Lanes<T>::count;

template <int N> struct Constant {
    static constexpr int value = N;
};

// Call f with `count` as a compile-time constant if it is from 1 to LIMIT.
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

// The numbers that a register tile multiplies: one of A with a vector of B, added to a vector of sums. PER is how many
// elements of A one step takes.
template <class E> struct Factors {
    typedef E B, Sum;
    static constexpr int PER = 1;

    INLINE static Vec<E> of_a(const E *a) { return splat<E>(*a); }
    INLINE static Vec<E> of_b(const E *b) { return load(b); }
    INLINE static Vec<E> add_product(Vec<E> sum, Vec<E> a, Vec<E> b) { return sum + a * b; }
};

// Rows of memory that are needed soon: each register tile asks for as many as it has itself, so that they arrive in the
// second cache while it computes.
struct Ahead {
    const void *x;
    int64_t step, bytes, rows;  // step in bytes

    INLINE void fetch(int64_t first, int64_t count) const {
        for (int64_t row = first; row < first + count && row < rows; row++)
            for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch((const char *)x + row * step + at, 0, 2);
    }
};

// If there are places, they say which rows of A there are, or of B if those of A are columns.
template <class E, int M, int N, bool A_ROWS, bool PLACES = false>
INLINE void register_tile(const E *a, int64_t a_step, const typename Factors<E>::B *b, int64_t b_k,
                          typename Factors<E>::Sum *c, int64_t c_m, int64_t depth, bool add,
                          const int32_t *places = nullptr) {
    using F = Factors<E>;
    using T = typename F::Sum;
    constexpr int L = Lanes<T>::count, PER = F::PER;
    Vec<T> sum[M][N];
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++) sum[m][n] = Vec<T>{};
    for (int64_t k = 0; k < depth; k++) {
        decltype(F::of_b(b)) row[N];
        for (int n = 0; n < N; n++) row[n] = F::of_b(b + (PLACES && !A_ROWS ? places[k] : k) * b_k + n * L);
        for (int m = 0; m < M; m++) {
            auto number = F::of_a(a + (A_ROWS ? (PLACES ? places[m] : m) * a_step + PER * k : PER * m + k * a_step));
            for (int n = 0; n < N; n++) sum[m][n] = F::add_product(sum[m][n], number, row[n]);
        }
    }
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++) {
            T *at = c + m * c_m + n * L;
            store(at, add ? load(at) + sum[m][n] : sum[m][n]);
        }
}

template <class E, int N, bool A_ROWS>
void columns_matmul(const E *a, int64_t a_step, const typename Factors<E>::B *b, int64_t b_k,
                    typename Factors<E>::Sum *c, int64_t c_m, int64_t rows, int64_t depth, bool add, Ahead ahead) {
    const int64_t a_m = A_ROWS ? a_step : Factors<E>::PER;
    int64_t row = 0;
    for (; row + MR <= rows; row += MR, a += MR * a_m, c += MR * c_m) {
        ahead.fetch(row, MR);
        register_tile<E, MR, N, A_ROWS>(a, a_step, b, b_k, c, c_m, depth, add);
    }
    ahead.fetch(row, MR);
    rows -= row;
    with_constant<MR - 1>(rows, [=](auto m) INLINE_LAMBDA {
        register_tile<E, decltype(m)::value, N, A_ROWS>(a, a_step, b, b_k, c, c_m, depth, add);
    });
}

// A_ROWS: A's rows are contiguous and a_step apart. Otherwise its columns are. `vectors` is the width of B and C, at
// most NR.
template <class E, bool A_ROWS>
INLINE void matmul(int vectors, const E *a, int64_t a_step, const typename Factors<E>::B *b, int64_t b_k,
                   typename Factors<E>::Sum *c, int64_t c_m, int64_t rows, int64_t depth, bool add, Ahead ahead = {}) {
    with_constant<NR>(vectors, [=](auto n) INLINE_LAMBDA {
        columns_matmul<E, decltype(n)::value, A_ROWS>(a, a_step, b, b_k, c, c_m, rows, depth, add, ahead);
    });
}

}  // namespace ISA
