// Vectors of the instruction set that this file is compiled for, and exp2 on them.
#pragma once
#include <stdint.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#elif defined(__AVX2__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif
#define INLINE inline __attribute__((always_inline))
#define SHARED inline __attribute__((noinline))
#define INLINE_LAMBDA __attribute__((always_inline))

namespace ISA {

template <class T> struct Lanes;
template <> struct Lanes<float> {
    typedef float vec __attribute__((vector_size(VECTOR_BYTES)));
    typedef float loose __attribute__((vector_size(VECTOR_BYTES), aligned(4), may_alias));
    typedef int32_t ints __attribute__((vector_size(VECTOR_BYTES)));
    using integer = int32_t;
    static constexpr int count = VECTOR_BYTES / 4;
};
template <> struct Lanes<double> {
    typedef double vec __attribute__((vector_size(VECTOR_BYTES)));
    typedef double loose __attribute__((vector_size(VECTOR_BYTES), aligned(8), may_alias));
    typedef int64_t ints __attribute__((vector_size(VECTOR_BYTES)));
    using integer = int64_t;
    static constexpr int count = VECTOR_BYTES / 8;
};

template <class T> using Vec = typename Lanes<T>::vec;
template <class T> using Ints = typename Lanes<T>::ints;

template <class T> INLINE Vec<T> load(const T *x) { return *(const typename Lanes<T>::loose *)x; }
template <class T> INLINE void store(T *x, Vec<T> v) { *(typename Lanes<T>::loose *)x = v; }
template <class T> INLINE Vec<T> splat(T x) { return x - Vec<T>{}; }

template <class T> INLINE Vec<T> max(Vec<T> a, Vec<T> b) { return a > b ? a : b; }

// (2^f - 1) / f on [-1/2, 1/2].
INLINE Vec<float> rise(Vec<float> f) {
    Vec<float> p = 0.0001535336164324439f * f + 0.0013398874573709574f;
    p = p * f + 0.009618437360017296f;
    p = p * f + 0.055503324706629f;
    p = p * f + 0.24022647913592815f;
    return p * f + 0.6931472028553305f;
}

INLINE Vec<double> rise(Vec<double> f) {
    // The Taylor series of 2^f: its 14th term is below 4e-18 on [-1/2, 1/2].
    const double ln2 = 0.69314718055994530942;
    Vec<double> p = splat<double>(1.0);
    for (int n = 13; n > 1; n--) p = p * f * (ln2 / n) + 1.0;
    return p * ln2;
}

// 2^x for x up to 127. Below the smallest normal number it returns that number, so callers select zeros instead of
// computing them. A NaN stays NaN because the power of two is multiplied, not added to the exponent.
template <class T> INLINE Vec<T> exp2(Vec<T> x) {
    constexpr bool narrow = sizeof(T) == 4;
    // Adding the magic number rounds x to an integer n and leaves n plus the exponent's bias in the low bits.
    const T lowest = narrow ? -126 : -1022, magic = narrow ? T(12582912.0 + 127) : T(6755399441055744.0 + 1023);
    x = x < lowest ? splat<T>(lowest) : x;
    Vec<T> rounded = x + magic;
    Vec<T> f = x - (rounded - magic), p = rise(f) * f + 1;
    return p * (Vec<T>)((Ints<T>)rounded << (narrow ? 23 : 52));
}

// A product as the processor rounds it. Compilers would fuse it with the sum that follows.
template <class T> INLINE Vec<T> rounded(Vec<T> x) {
#if defined(__aarch64__)
    asm("" : "+w"(x));
#else
    asm("" : "+v"(x));
#endif
    return x;
}

// score * scale - lse in base 2, of which the weight is 2^x. An lse is the rounded product of the row's highest score if
// no other score counts, so x is exactly 0 there, no matter how large the score is.
template <class T> INLINE Vec<T> exponent_of(Vec<T> score, T scale, Vec<T> lse) {
    return (rounded<T>(score * scale) - lse) * T(1.44269504088896340736);
}

#if defined(__AVX512F__)
// The same with AVX-512 instructions: reduce x to its fraction, evaluate the polynomial, scale by 2^floor(x).
template <> INLINE Vec<float> exp2<float>(Vec<float> x) {
    // Unmasked, GCC 12 warns of an operand that its own header leaves unset.
    __m512 above = _mm512_maskz_max_ps(0xffff, _mm512_set1_ps(-126), (__m512)x);
    Vec<float> f = (Vec<float>)_mm512_reduce_ps(above, _MM_FROUND_TO_NEG_INF);
    Vec<float> p = 0.00021612914861179888f * f + 0.0012467846972867846f;
    p = p * f + 0.009675451554358006f;
    p = p * f + 0.055485282093286514f;
    p = p * f + 0.2402293086051941f;
    p = p * f + 0.6931470632553101f;
    return (Vec<float>)_mm512_maskz_scalef_ps(0xffff, (__m512)(p * f + 1.0f), above);
}
#endif

// Bit i of a bitmask.
INLINE uint32_t bit(const uint32_t *bits, int i) { return bits[i >> 5] >> (i & 31) & 1; }

// All ones in the lanes whose bit is set, starting at bit `first` of a bitmask.
template <class T> INLINE Ints<T> lanes_of(const int32_t *bits, int first) {
    using integer = typename Lanes<T>::integer;
    integer word = (integer)((uint32_t)bits[first >> 5] >> (first & 31));
    Ints<T> lane;
    for (int i = 0; i < Lanes<T>::count; i++) lane[i] = (integer)1 << i;
    return ((lane & word) != 0);
}

// a * b + c, rounded once, as compilers round it in a product of matrices.
INLINE float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
INLINE double fused(double a, double b, double c) { return __builtin_fma(a, b, c); }

INLINE float exact_log(float x) { return __builtin_logf(x); }
// log1p is as exact near 1 and above, and links with C libraries older than glibc 2.29, which changed log.
INLINE double exact_log(double x) { return __builtin_log1p(x - 1); }

template <class T> INLINE T infinity();
template <> INLINE float infinity<float>() { return __builtin_inff(); }
template <> INLINE double infinity<double>() { return __builtin_inf(); }

INLINE float widen(float x) { return x; }
INLINE double widen(double x) { return x; }
struct bfloat16 { uint16_t bits; };
#if defined(__aarch64__)
using float16 = __fp16;  // g++ knows _Float16 there since version 13 only
#else
using float16 = _Float16;
#endif
INLINE float widen(bfloat16 x) {
    uint32_t bits = (uint32_t)x.bits << 16;
    float y;
    __builtin_memcpy(&y, &bits, 4);
    return y;
}
INLINE float widen(float16 x) { return (float)x; }

// Load as many elements as a vector has lanes, widened. Compilers vectorize the loop for bfloat16 but not for float16.
template <class E, class T> INLINE Vec<T> load_wide(const E *x) {
    if constexpr (sizeof(E) == sizeof(T)) return load((const T *)x);
    T y[Lanes<T>::count];
    for (int i = 0; i < Lanes<T>::count; i++) y[i] = (T)widen(x[i]);
    return load(y);
}
#if defined(__AVX512F__)
template <> INLINE Vec<float> load_wide<float16, float>(const float16 *x) {
    return (Vec<float>)_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256((const __m256i *)x));
}
#elif defined(__AVX2__)
template <> INLINE Vec<float> load_wide<float16, float>(const float16 *x) {
    return (Vec<float>)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)x));
}
#endif

// The reverse, rounded to nearest, ties to even.
template <class E, class T> INLINE void store_narrow(E *x, Vec<T> v) {
    for (int i = 0; i < Lanes<T>::count; i++) x[i] = (E)v[i];
}
template <> INLINE void store_narrow<bfloat16, float>(bfloat16 *x, Vec<float> v) {
    // A set quiet bit keeps a NaN whose payload would round away.
    typedef uint32_t bits32 __attribute__((vector_size(VECTOR_BYTES)));
    typedef uint16_t bits16 __attribute__((vector_size(VECTOR_BYTES / 2)));
    bits32 bits = (bits32)v, rounded = bits + 0x7fff + (bits >> 16 & 1);
    bits16 high = __builtin_convertvector((v != v ? bits | 64 << 16 : rounded) >> 16, bits16);
    __builtin_memcpy(x, &high, sizeof(high));
}
#if defined(__AVX512F__)
template <> INLINE void store_narrow<float16, float>(float16 *x, Vec<float> v) {
    _mm256_storeu_si256((__m256i *)x, _mm512_maskz_cvtps_ph(0xffff, (__m512)v, _MM_FROUND_TO_NEAREST_INT));
}
#elif defined(__AVX2__)
template <> INLINE void store_narrow<float16, float>(float16 *x, Vec<float> v) {
    _mm_storeu_si128((__m128i *)x, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
}
#endif

}  // namespace ISA
