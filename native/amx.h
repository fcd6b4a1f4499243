// The tiles of AMX: eight registers of 16 rows of 64 bytes, and products of bfloat16 pairs on them. Where AMX_EMULATED
// is defined, plain code computes the same bits on any processor with AVX-512, and the sanitizers see every access.
#pragma once
#include "simd.h"

namespace ISA {

constexpr int AMX_SIDE = 16;                       // rows of a register, and its columns of 32 bits
constexpr int AMX_NUMBERS = AMX_SIDE * AMX_SIDE;  // of 32 bits

// While the thread computes with tiles, denormal numbers are zero for its vectors too: tiles know none.
struct FlushedDenormals {
    const unsigned before;

    INLINE FlushedDenormals() : before(_mm_getcsr()) { _mm_setcsr(before | 0x8040); }
    INLINE ~FlushedDenormals() { _mm_setcsr(before); }
};

#if !defined(AMX_EMULATED)
// Two vectors to 32 bfloat16 numbers, those of `first` before the others: ties to even, denormal numbers to zero.
INLINE __m512i narrowed(__m512 first, __m512 second) { return (__m512i)_mm512_cvtne2ps_pbh(second, first); }

// The tiles of this thread, from their configuration to their release: a thread that kept them would make each change
// of context slower, and other libraries would take them for their own.
struct AmxUnit {
    FlushedDenormals denormals;

    INLINE AmxUnit() {
        struct alignas(64) {
            uint8_t palette, start, reserved[14];
            uint16_t row_bytes[16];
            uint8_t rows[16];
        } shape = {};
        shape.palette = 1;
        for (int i = 0; i < 8; i++) shape.row_bytes[i] = 64, shape.rows[i] = AMX_SIDE;
        asm volatile(".byte 0xc4, 0xe2, 0x78, 0x49, 0x00  # ldtilecfg (%%rax)" ::"a"(&shape) : "memory");
    }
    INLINE ~AmxUnit() { asm volatile(".byte 0xc4, 0xe2, 0x78, 0x49, 0xc0  # tilerelease" ::: "memory"); }
};

// Bytes, because assemblers before 2020 know no names for them. Each names memory as clobbered: GCC's own functions do
// not, so it may move a vector's store past them. `step` is in bytes.
template <int R> INLINE void amx_load(const void *x, int64_t step) {
    asm volatile(".byte 0xc4, 0xe2, 0x7b, 0x4b, %c2, 0x08  # tileloadd (%%rax, %%rcx), %%tmm" ::"a"(x), "c"(step),
                 "i"(4 + 8 * R) : "memory");
}
template <int R> INLINE void amx_store(void *x, int64_t step) {
    asm volatile(".byte 0xc4, 0xe2, 0x7a, 0x4b, %c2, 0x08  # tilestored %%tmm, (%%rax, %%rcx)" ::"a"(x), "c"(step),
                 "i"(4 + 8 * R) : "memory");
}
template <int R> INLINE void amx_zero() {
    asm volatile(".byte 0xc4, 0xe2, 0x7b, 0x49, %c0  # tilezero %%tmm" ::"i"(0xc0 + 8 * R) : "memory");
}
// C[m][n] += A(m, pair k) . B[k](pair n). The three registers differ.
template <int C, int A, int B> INLINE void amx_dot() {
    static_assert(C != A && A != B && B != C);
    asm volatile(".byte 0xc4, 0xe2, %c0, 0x5c, %c1  # tdpbf16ps" ::"i"(2 + 8 * (15 - B)), "i"(0xc0 + 8 * C + A)
                 : "memory");
}
#else
using TileRow = float[AMX_SIDE];

// Null in a thread without a AmxUnit. This model of thread-local memory needs no function of the loader.
static __attribute__((tls_model("initial-exec"))) thread_local TileRow (*amx_registers)[AMX_SIDE];

struct AmxUnit {
    FlushedDenormals denormals;
    TileRow memory[8][AMX_SIDE];

    INLINE AmxUnit() : memory() { amx_registers = memory; }
    INLINE ~AmxUnit() { amx_registers = nullptr; }
};

template <int R> INLINE void amx_load(const void *x, int64_t step) {
    for (int i = 0; i < AMX_SIDE; i++) __builtin_memcpy(amx_registers[R][i], (const char *)x + i * step, 64);
}
template <int R> INLINE void amx_store(void *x, int64_t step) {
    for (int i = 0; i < AMX_SIDE; i++) __builtin_memcpy((char *)x + i * step, amx_registers[R][i], 64);
}
template <int R> INLINE void amx_zero() { __builtin_memset(amx_registers[R], 0, sizeof(amx_registers[R])); }

INLINE Vec<float> without_denormals(Ints<float> x) {
    const Ints<float> sign = x & (int32_t)0x80000000;
    return (Vec<float>)((x & 0x7f800000) == 0 ? sign : x);
}
INLINE Vec<float> flushed_fma(Vec<float> a, Vec<float> b, Vec<float> c) {
    return without_denormals((Ints<float>)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c));
}

INLINE __m512i narrowed(__m512 first, __m512 second) {
    const auto high_half = [](__m512 x) INLINE_LAMBDA {
        typedef uint32_t Unsigned __attribute__((vector_size(VECTOR_BYTES)));
        const Unsigned bits = (Unsigned)without_denormals((Ints<float>)x), odd = bits >> 16 & 1;
        const Unsigned high = ((Vec<float>)x != (Vec<float>)x ? bits | 64 << 16 : bits + 0x7fff + odd) >> 16;
        return _mm512_maskz_cvtepi32_epi16(0xffff, (__m512i)high);
    };
    const __m256i halves[2] = {high_half(first), high_half(second)};
    return _mm512_loadu_si512(halves);
}

// Even and odd halves of pairs have a sum each, and C is added last.
static __attribute__((noinline)) void add_tile_products(TileRow *c, const TileRow *a, const TileRow *b) {
    const int32_t high = (int32_t)0xffff0000;
    Vec<float> low_b[AMX_SIDE], high_b[AMX_SIDE];
    for (int k = 0; k < AMX_SIDE; k++) {
        const Ints<float> pair = (Ints<float>)load(b[k]);
        low_b[k] = without_denormals(pair << 16);
        high_b[k] = without_denormals(pair & high);
    }
    for (int m = 0; m < AMX_SIDE; m++) {
        Vec<float> even = {}, odd = {};
        for (int k = 0; k < AMX_SIDE; k++) {
            int32_t pair;
            __builtin_memcpy(&pair, a[m] + k, 4);
            const Ints<float> both = pair - Ints<float>{};
            even = flushed_fma(without_denormals(both << 16), low_b[k], even);
            odd = flushed_fma(without_denormals(both & high), high_b[k], odd);
        }
        const Vec<float> sum = without_denormals((Ints<float>)(even + odd));
        store(c[m], without_denormals((Ints<float>)(without_denormals((Ints<float>)load(c[m])) + sum)));
    }
}

template <int C, int A, int B> INLINE void amx_dot() {
    static_assert(C != A && A != B && B != C);
    // To nearest even and flushed by the code above, whatever the thread's own modes are.
    const unsigned before = _mm_getcsr();
    _mm_setcsr(0x1f80);
    add_tile_products(amx_registers[C], amx_registers[A], amx_registers[B]);
    _mm_setcsr(before);
}
#endif

}  // namespace ISA
