// The pairs of a tile that dropout keeps: Philox4x32-7 of (call, query, head, batch), one query per lane, 16 bits per key.
#pragma once
#include "tile.h"
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace ISA {

typedef int64_t Words __attribute__((vector_size(VECTOR_BYTES)));
constexpr int WORD_LANES = VECTOR_BYTES / 8;

// Multiply the low halves of the lanes and ignore the high halves.
INLINE Words wide_product(Words x, uint32_t y) {
#if defined(__AVX512F__)
    // Unmasked, GCC 12 warns of an operand that its own header leaves unset.
    return (Words)_mm512_maskz_mul_epu32(0xff, (__m512i)x, _mm512_set1_epi64(y));
#elif defined(__AVX2__)
    return (Words)_mm256_mul_epu32((__m256i)x, _mm256_set1_epi64x(y));
#else
    return (x & (int64_t)0xffffffff) * (int64_t)y;
#endif
}

INLINE Words high_half(Words x) {
    typedef uint64_t Unsigned __attribute__((vector_size(VECTOR_BYTES)));
    return (Words)((Unsigned)x >> 32);
}

// One bit per lane, set if the lane is all ones.
INLINE uint32_t lane_bits(Words x) {
#if defined(__AVX512F__)
    return _mm512_movepi64_mask((__m512i)x);
#elif defined(__AVX2__)
    return (uint32_t)_mm256_movemask_pd((__m256d)x);
#else
    uint32_t bits = 0;
    for (int i = 0; i < WORD_LANES; i++) bits |= (uint32_t)(x[i] & 1) << i;
    return bits;
#endif
}

struct Dropout {
    uint32_t key[7][2];
    uint32_t head, batch, threshold;
};

INLINE Dropout dropout_of(const ringtile_call &c, const Head &head) {
    Dropout p;
    uint32_t low = (uint32_t)c.options.seed, high = (uint32_t)((uint64_t)c.options.seed >> 32);
    for (int round = 0; round < 7; round++) {
        p.key[round][0] = low + round * 0x9E3779B9u;
        p.key[round][1] = high + round * 0xBB67AE85u;
    }
    p.head = (uint32_t)(c.options.head_at ? c.options.head_at[head.h] : head.h);
    p.batch = (uint32_t)(c.options.batch_at ? c.options.batch_at[head.b] : head.b);
    p.threshold = (uint32_t)c.options.dropout_threshold;
    return p;
}

INLINE void philox(const Dropout &p, uint32_t call, Words query, Words *words) {
    Words c0 = Words{} + (int64_t)call, c1 = query, c2 = Words{} + (int64_t)p.head, c3 = Words{} + (int64_t)p.batch;
    for (int round = 0; round < 7; round++) {
        Words first = wide_product(c0, 0xD2511F53u), second = wide_product(c2, 0xCD9E8D57u);
        c0 = high_half(second) ^ c1 ^ (int64_t)p.key[round][0];
        c2 = high_half(first) ^ c3 ^ (int64_t)p.key[round][1];
        c1 = second;
        c3 = first;
    }
    words[0] = c0, words[1] = c1, words[2] = c2, words[3] = c3;
}

// The kept pairs of a tile as bits: bit `key lane` of keep[query lane] (BY_QUERY) or bit `query lane` of keep[key lane].
template <bool BY_QUERY>
void dropout_bits(const Dropout &p, Side queries, Side keys, uint32_t (*keep)[MAX_WORDS]) {
    for (int i = 0; i < MAX_BLOCK; i++)
        for (int w = 0; w < MAX_WORDS; w++) keep[i][w] = 0;
    Words lane;
    for (int i = 0; i < WORD_LANES; i++) lane[i] = i;
    for (int64_t window = keys.position & ~(int64_t)31; window < keys.position + keys.high; window += 32) {
        int at = (int)(window - keys.position), first = at < 0 ? -at : 0, end = (int)min(32, keys.high - at);
        for (int q = queries.low / WORD_LANES * WORD_LANES; q < queries.high; q += WORD_LANES) {
            Words query = lane + (queries.position + q), words[4][4], bits = {};
            for (int call = 0; call < 4; call++) philox(p, (uint32_t)(window / 32 * 4 + call), query, words[call]);
            for (int key = first; key < end; key++) {
                Words kept = ((words[key / 2 % 4][key / 8] >> (key % 2 * 16)) & 0xffff) >= (int64_t)p.threshold;
                if (BY_QUERY) bits |= kept & ((int64_t)1 << key);
                else keep[at + key][q >> 5] |= lane_bits(kept) << (q & 31);
            }
            if (!BY_QUERY) continue;
            for (int i = 0; i < WORD_LANES && q + i < MAX_BLOCK; i++) {
                uint32_t word = (uint32_t)bits[i];
                if (at >= 0) keep[q + i][at >> 5] |= word << (at & 31);
                else keep[q + i][0] |= word >> -at;
            }
        }
    }
}

}  // namespace ISA
