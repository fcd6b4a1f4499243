// The processor's peak rates, measured with the kernels' own vectors, for rooflines.
#if defined(AMX)
#include "amx.h"
#endif
#include "bf16.h"
#include "platform.h"
#include "ringtile.h"

namespace ISA {

constexpr int64_t ROUNDS = 4096, NUMBERS = 1024, READ_BYTES = 64 << 20;

// Each block of work returns its size. It has as many independent sums as a register tile of the kernels.
template <class T> int64_t multiply_add(T *x) {
    constexpr int L = Lanes<T>::count, M = MR, N = NR;
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

#if defined(AMX)
static int64_t multiply_pairs(float *x) {
    const int64_t rounds = ROUNDS / 16;
    AmxUnit unit;
    amx_zero<0>(), amx_zero<1>(), amx_zero<2>(), amx_zero<3>();
    amx_load<4>(x, 64), amx_load<5>(x + AMX_NUMBERS, 64);
    for (int64_t round = 0; round < rounds; round++)
        amx_dot<0, 4, 5>(), amx_dot<1, 4, 5>(), amx_dot<2, 4, 5>(), amx_dot<3, 4, 5>();
    amx_store<0>(x + 2 * AMX_NUMBERS, 64), amx_store<1>(x + 2 * AMX_NUMBERS, 64);
    amx_store<2>(x + 2 * AMX_NUMBERS, 64), amx_store<3>(x + 2 * AMX_NUMBERS, 64);
    return 2 * rounds * 4 * AMX_NUMBERS * 32;
}
#elif HAS_BF16_PAIRS
static int64_t multiply_pairs(float *x) {
    constexpr int M = MR, N = NR;
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

// Scale and shift numbers, compute exp2 and sum, like the softmax.
template <class T> int64_t exponentiate(T *x) {
    constexpr int L = Lanes<T>::count, N = NR;
    Vec<T> sum[N] = {};
    for (int64_t round = 0; round < ROUNDS / 64; round++) {
        T shift = T(round & 7);
        for (int64_t i = 0; i < NUMBERS; i += N * L)
            for (int n = 0; n < N; n++) {
                Vec<T> p = exp2<T>((load(x + i + n * L) - shift) * T(0.5));
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
#if defined(AMX) || HAS_BF16_PAIRS
    case RINGTILE_DOT_BFLOAT16: return multiply_pairs((float *)x);
#endif
    default: return 0;
    }
}

constexpr int64_t WORK_BYTES = 4 * NUMBERS * 8;

struct Measured {
    int kind, ready, started;
    double seconds;
    struct Own {
        void *x;
        double rate;
    } *own;
};

// Threads allocate and warm up first, so that all of them measure at the same time.
static void warm_up(void *data) {
    Measured &all = *(Measured *)data;
    int number = __atomic_fetch_add(&all.ready, 1, __ATOMIC_RELAXED);
    int64_t bytes = all.kind == RINGTILE_READ ? READ_BYTES : WORK_BYTES;
    void *x = allocate_aligned(bytes);
    all.own[number].x = x;
    if (!x) return;
    if (all.kind == RINGTILE_FMA_FLOAT64 || all.kind == RINGTILE_EXP_FLOAT64)
        for (int64_t i = 0; i < bytes / 8; i++) ((double *)x)[i] = 0.5;
    else if (all.kind == RINGTILE_DOT_BFLOAT16) {
        // Numbers from 1 to 2 of either sign: a processor multiplies zeros, or one number again and again, faster.
        uint32_t random = 1;
        for (int64_t i = 0; i < bytes / 2; i++, random = random * 1103515245 + 12345)
            ((uint16_t *)x)[i] = (uint16_t)(0x3f80 | (random >> 16 & 0x807f));
    } else
        for (int64_t i = 0; i < bytes / 4; i++) ((float *)x)[i] = 0.5f;
    block_of(all.kind, x);
}

static void measure(void *data) {
    Measured &all = *(Measured *)data;
    int number = __atomic_fetch_add(&all.started, 1, __ATOMIC_RELAXED);
    if (number >= all.ready || !all.own[number].x) return;
    int64_t began = nanoseconds(), done = 0;
    double took = 0;
    while (took < all.seconds) {
        int64_t block = block_of(all.kind, all.own[number].x);
        if (!block) return;
        done += block;
        took = 1e-9 * (double)(nanoseconds() - began);
    }
    all.own[number].rate = (double)done / took;
}

// Operations, exponentials or bytes per second, summed over the threads, or 0 if the instruction set lacks this kind.
static double rate_of(int kind, int threads, double seconds) {
    Measured all = {kind, 0, 0, seconds, (Measured::Own *)calloc(threads, sizeof(Measured::Own))};
    if (!all.own) return 0;
    ringtile_parallel(threads, warm_up, &all);
    ringtile_parallel(threads, measure, &all);
    double rate = 0;
    for (int i = 0; i < threads; i++) {
        rate += all.own[i].rate;
        free_aligned(all.own[i].x);
    }
    free(all.own);
    return rate;
}

}  // namespace ISA

#define JOIN(a, b) a##b
#define NAME(a, b) JOIN(a, b)

extern "C" double NAME(ringtile_peak_, ISA)(int kind, int threads, double seconds) {
    return ISA::rate_of(kind, threads, seconds);
}
