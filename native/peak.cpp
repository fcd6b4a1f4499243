// What this processor does at most, measured with the kernels' own vectors: what a roofline is drawn from.
#include <stdlib.h>

#include "pairs.h"
#include "ringtile.h"

namespace ISA {

constexpr int64_t ROUNDS = 4096, NUMBERS = 1024, READ_BYTES = 64 << 20;

// Each block of work returns how much it was. As many sums as the kernels' register tiles have; none waits for another.
template <class T> int64_t multiply_add(T *x) {
    constexpr int L = Lanes<T>::count, M = TILE_ROWS, N = TILE_VECTORS;
    Vec<T> sum[M][N], factor = load(x), term = load(x + L);
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++) sum[m][n] = splat<T>(T(m * N + n));
    for (int64_t round = 0; round < ROUNDS; round++)
        for (int m = 0; m < M; m++)
            for (int n = 0; n < N; n++) sum[m][n] = sum[m][n] * factor + term;
    Vec<T> total = {};
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++) total += sum[m][n];
    store(x + 2 * L, total);
    return 2 * ROUNDS * M * N * L;
}

#if HAS_PAIRS
static int64_t multiply_pairs(float *x) {
    constexpr int M = TILE_ROWS, N = TILE_VECTORS;
    __m512 sum[M][N];
    __m512bh factor = (__m512bh)_mm512_loadu_si512(x), other = (__m512bh)_mm512_loadu_si512(x + 16);
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++) sum[m][n] = _mm512_setzero_ps();
    for (int64_t round = 0; round < ROUNDS; round++)
        for (int m = 0; m < M; m++)
            for (int n = 0; n < N; n++) sum[m][n] = _mm512_dpbf16_ps(sum[m][n], factor, other);
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++) _mm512_storeu_ps(x + 32 + (m * N + n) * 16, sum[m][n]);
    return 2 * ROUNDS * M * N * 32;
}
#endif

// As the softmax has it: a number scaled and shifted, exp2, a sum.
template <class T> int64_t exponentiate(T *x) {
    constexpr int L = Lanes<T>::count, N = TILE_VECTORS;
    Vec<T> sum[N] = {};
    for (int64_t round = 0; round < ROUNDS / 64; round++) {
        T shift = T(round & 7);
        for (int64_t i = 0; i < NUMBERS; i += N * L)
            for (int n = 0; n < N; n++) {
                Vec<T> p = exp2<T>(load(x + i + n * L) * T(0.5) - shift);
                store(x + NUMBERS + i + n * L, p);
                sum[n] += p;
            }
    }
    for (int n = 0; n < N; n++) store(x + 2 * NUMBERS + n * L, sum[n]);
    return ROUNDS / 64 * NUMBERS;
}

static int64_t read_all(float *x) {
    constexpr int L = Lanes<float>::count;
    Vec<float> sum[8] = {};
    for (int64_t i = 0; i < READ_BYTES / 4; i += 8 * L)
        for (int n = 0; n < 8; n++) sum[n] += load(x + i + n * L);
    for (int n = 1; n < 8; n++) sum[0] += sum[n];
    store(x, sum[0] * 0.0f);
    return READ_BYTES;
}

static int64_t block_of(int kind, void *x) {
    switch (kind) {
    case RINGTILE_FMA_FLOAT32: return multiply_add<float>((float *)x);
    case RINGTILE_FMA_FLOAT64: return multiply_add<double>((double *)x);
    case RINGTILE_EXP_FLOAT32: return exponentiate<float>((float *)x);
    case RINGTILE_EXP_FLOAT64: return exponentiate<double>((double *)x);
    case RINGTILE_READ: return read_all((float *)x);
#if HAS_PAIRS
    case RINGTILE_DOT_BFLOAT16: return multiply_pairs((float *)x);
#endif
    default: return 0;
    }
}

// All threads together, each for so many seconds: operations, exponentials or bytes a second; 0 where there is none.
static double rate_of(int kind, int threads, double seconds) {
    double rate = 0;
#pragma omp parallel num_threads(threads) reduction(+ : rate)
    {
        int64_t bytes = kind == RINGTILE_READ ? READ_BYTES : 4 * NUMBERS * 8, done = 0;
        void *x = aligned_alloc(64, bytes);
        if (x) {
            if (kind == RINGTILE_FMA_FLOAT64 || kind == RINGTILE_EXP_FLOAT64)
                for (int64_t i = 0; i < bytes / 8; i++) ((double *)x)[i] = 0.5;
            else
                for (int64_t i = 0; i < bytes / 4; i++) ((float *)x)[i] = 0.5f;
            block_of(kind, x);
        }
#pragma omp barrier
        int64_t began = nanoseconds();
        double took = 0;
        while (x && took < seconds) {
            int64_t block = block_of(kind, x);
            if (!block) break;
            done += block;
            took = 1e-9 * (double)(nanoseconds() - began);
        }
        if (done) rate += (double)done / took;
        free(x);
    }
    return rate;
}

}  // namespace ISA

#define JOIN(a, b) a##b
#define NAME(a, b) JOIN(a, b)

extern "C" __attribute__((visibility("hidden"))) double NAME(ringtile_peak_, ISA)(int kind, int threads,
                                                                                  double seconds) {
    return ISA::rate_of(kind, threads, seconds);
}
