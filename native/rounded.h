// Softmax weights of queries and keys that are rounded to 8 bits, summed per segment of keys, whose products are sums of
// integers. Output rows pool the root mean squares of their queries.
#pragma once
#include "forward.h"

namespace ISA {

constexpr int PIECE = 16;  // queries of an output row that are computed together
constexpr int PIECES = VECTOR_BYTES == 64 ? 2 : 1;
constexpr int STRIP = PIECES * PIECE;  // queries that read a key together, in the lanes of STRIP_VECTORS
constexpr int STRIP_VECTORS = STRIP / Lanes<float>::count;
constexpr int BATCH = VECTOR_BYTES == 64 ? 8 : 4;  // keys whose products stay in registers

// Products of words: of WORD_DIMS dims of a key with those of each query of a strip. All are sums of integers below 2^24
// for a head_dim up to 1024, so float32 holds them, too.
#if defined(__AVX512VNNI__)
constexpr int WORD_DIMS = 4;
using Word = int32_t;
using Part = int8_t;
using Sums = Ints<float>;
// Bytes of queries are unsigned: 128 is added to them, and what that adds to a product is taken off.
INLINE Word query_word(const int8_t *x) {
    uint32_t word;
    __builtin_memcpy(&word, x, 4);
    return (Word)(word ^ 0x80808080u);
}
INLINE Sums start_of(int32_t sum) { return Sums{} - 128 * sum; }
INLINE Sums add_product(Sums sums, Sums query, Word key) {
    return (Sums)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)query, _mm512_set1_epi32(key));
}
#elif defined(__AVX512BW__) || defined(__AVX2__)
constexpr int WORD_DIMS = 2;
using Word = int32_t;
using Part = int16_t;
using Sums = Ints<float>;
INLINE Word query_word(const int8_t *x) { return (Word)((uint32_t)(uint16_t)x[0] | (uint32_t)(uint16_t)x[1] << 16); }
INLINE Sums start_of(int32_t) { return Sums{}; }
INLINE Sums add_product(Sums sums, Sums query, Word key) {
#if defined(__AVX512BW__)
    return sums + (Sums)_mm512_madd_epi16((__m512i)query, _mm512_set1_epi32(key));
#else
    return sums + (Sums)_mm256_madd_epi16((__m256i)query, _mm256_set1_epi32(key));
#endif
}
#else
constexpr int WORD_DIMS = 1;
using Word = float;
using Part = float;
using Sums = Vec<float>;
INLINE Word query_word(const int8_t *x) { return (Word)*x; }
INLINE Sums start_of(int32_t) { return Sums{}; }
INLINE Sums add_product(Sums sums, Sums query, Word key) { return query * key + sums; }
#endif

constexpr float OCTAVE = 8388608.0f;        // from a power of 2 to the next one, in bits of a float
constexpr float ONE = 127 * OCTAVE;
constexpr float CENTERED = ONE - 361024;    // the errors of a linear mantissa are as large above as below
constexpr float MAX_EXPONENT = 65536;       // scores in base 2, of which a float knows the exponent within 2^-8

INLINE bool is_finite(float x) { return x <= 3.402823466e38f; }

// The number that has these bits, 0 if they are negative or a NaN. Between powers of 2, it grows linearly: of a weight,
// that is within 3 %, which is less than what rounding to 8 bits costs.
INLINE Vec<float> of_bits(Vec<float> bits) {
#if defined(__AVX512F__)
    const Ints<float> x = (Ints<float>)_mm512_maskz_cvtps_epi32(0xffff, (__m512)bits);
    return (Vec<float>)(x > 0 ? x : Ints<float>{});
#else
    return (Vec<float>)__builtin_convertvector(max<float>(bits, Vec<float>{}), Ints<float>);
#endif
}

// A whole number near x, which is any if x is LARGE enough.
template <bool LARGE> INLINE Vec<float> whole(Vec<float> x) {
    const float magic = 12582912.0f, large = 4194304.0f;
    const Vec<float> near = x + magic - magic;
    if (!LARGE) return near;
    return (x < large) & (x > -large) ? near : x;
}

// A segment has an entry: for each query of a strip, the sum of its weights over 2^reference, and the reference, a whole
// number near its highest score in base 2.
struct RoundedScratch {
    int64_t words;
    float most;                 // the largest scale of a key times factor of a query that keeps scores below MAX_EXPONENT
    Word *queries;              // [words][STRIP]
    Part *keys;                 // [BATCH][words * WORD_DIMS]
    float *sums, *references;   // [segments][STRIP]
    int64_t *counted;           // queries of each output row that have a share

    static int64_t segments(const ringtile_call &c) { return (c.n_keys + c.masses.segment - 1) / c.masses.segment; }
    static int64_t size(const ringtile_call &c) {
        return c.head_dim / WORD_DIMS * (STRIP + BATCH * WORD_DIMS) + 2 * segments(c) * STRIP + 2 * c.masses.pooled_step;
    }
    RoundedScratch(const ringtile_call &c, float *x) : words(c.head_dim / WORD_DIMS), most(MAX_EXPONENT / (float)(c.head_dim * 16384)) {
        sums = x;
        references = sums + segments(c) * STRIP;
        queries = (Word *)(references + segments(c) * STRIP);
        counted = (int64_t *)(queries + words * STRIP);
        keys = (Part *)(counted + c.masses.pooled_step);
        // Lanes without a query are multiplied, too: sums of anything else could overflow.
        for (int64_t i = 0; i < words * STRIP; i++) queries[i] = Word();
    }
};

// What a strip's queries see, and the factors of their scores. The highest one is a NaN if one is not finite.
struct StripQueries {
    int32_t seen[STRIP];
    float factors[STRIP], highest;
    int64_t least, limit;
};

// A batch: its keys follow one another after `stride` parts.
struct KeyBatch {
    const Part *keys;
    int64_t stride;
    const int32_t *sums;
    const float *scale;
    const float *bias;  // or null
    int64_t first;
    int count;
};

using Products = Sums[BATCH][STRIP_VECTORS];

// The products of a strip's queries [words][STRIP] with a batch of keys, whose numbers have these sums.
INLINE void multiply(const Word *queries, const Part *keys, int64_t stride, int64_t words, const int32_t *sums, Products &to) {
    for (int k = 0; k < BATCH; k++)
        for (int n = 0; n < STRIP_VECTORS; n++) to[k][n] = start_of(sums[k]);
    for (int64_t w = 0; w < words; w++) {
        Sums query[STRIP_VECTORS];
        for (int n = 0; n < STRIP_VECTORS; n++) query[n] = *(const Sums *)(queries + w * STRIP + n * Lanes<float>::count);
        for (int k = 0; k < BATCH; k++) {
            Word key;
            __builtin_memcpy(&key, keys + k * stride + w * WORD_DIMS, sizeof(Word));
            for (int n = 0; n < STRIP_VECTORS; n++) to[k][n] = add_product(to[k][n], query[n], key);
        }
    }
}

// The best or the sum of COUNT vectors, in pairs. Compilers leave a loop over halves in memory.
template <int COUNT, class F> INLINE Vec<float> reduced(const Vec<float> *x, F join) {
    if constexpr (COUNT == 1) return x[0];
    else return join(reduced<COUNT / 2>(x, join), reduced<COUNT / 2>(x + COUNT / 2, join));
}

// Set the entry of a segment by its first batch, and add others to it. PLAIN: all queries see all keys of the batch, and no
// score is too large. Out of line, so that all sums stay in registers.
template <bool PLAIN>
SHARED void weigh(const RoundedScratch &to, const StripQueries &queries, const KeyBatch &batch, int64_t segment, bool first) {
    constexpr int L = Lanes<float>::count;
    const float low = -infinity<float>(), high = infinity<float>();
    Products products;
    multiply(to.queries, batch.keys, batch.stride, to.words, batch.sums, products);
    // A loop that is not unrolled keeps the products in memory.
#pragma GCC unroll 4
    for (int n = 0; n < STRIP_VECTORS; n++) {
        const Vec<float> factors = load(queries.factors + n * L);
        Ints<float> limits;
        for (int l = 0; l < L; l++) limits[l] = queries.seen[n * L + l];
        Vec<float> scores[BATCH], weights[BATCH];
        for (int k = 0; k < BATCH; k++) {
            scores[k] = __builtin_convertvector(products[k][n], Vec<float>) * batch.scale[k];
            if (!PLAIN) {
                // A key with a NaN or an infinity: queries that see it become 0.
                if (!is_finite(batch.scale[k])) scores[k] = splat<float>(high);
                if (batch.bias && batch.bias[k] == low) scores[k] = splat<float>(low);
                scores[k] = limits > (int32_t)(batch.first + k) ? scores[k] : splat<float>(low);
                if (k >= batch.count) scores[k] = splat<float>(low);
            }
        }
        const Vec<float> best = reduced<BATCH>(scores, [](Vec<float> x, Vec<float> y) INLINE_LAMBDA { return max<float>(x, y); });
        Vec<float> own = whole<!PLAIN>(rounded<float>(best * factors));
        // A factor of 0 would make NaNs of these.
        if (!PLAIN) own = (best == low) | (best == high) ? best : own;
        float *sums = to.sums + segment * STRIP + n * L, *references = to.references + segment * STRIP + n * L;
        const Vec<float> before = first ? splat<float>(low) : load(references), reference = max<float>(before, own);
        const Vec<float> base = PLAIN ? reference : reference == low ? Vec<float>{} : reference;
        const Vec<float> octaves = factors * OCTAVE, shift = CENTERED - base * OCTAVE;
        for (int k = 0; k < BATCH; k++) {
            Vec<float> bits = scores[k] * octaves + shift;
            if (!PLAIN) {
                // The difference of scores first: both are exact, then it is, too.
                const Vec<float> large = (rounded<float>(scores[k] * factors) - base) * OCTAVE + CENTERED;
                bits = factors * batch.scale[k] <= to.most ? bits : large;
            }
            weights[k] = of_bits(bits);
        }
        Vec<float> sum = reduced<BATCH>(weights, [](Vec<float> x, Vec<float> y) INLINE_LAMBDA { return x + y; });
        if (!first) sum += load(sums) * of_bits((before - base) * OCTAVE + ONE);
        store(sums, sum);
        store(references, reference);
    }
}

// Set the entries of a strip, up to the last key that one of its queries sees.
SHARED void weigh_strip(const ringtile_call &c, const Head &head, const StripQueries &queries, RoundedScratch &to) {
    const int64_t length = c.masses.segment, of_head = (head.b * c.kv_heads + head.kv) * c.n_keys, width = to.words * WORD_DIMS;
    const int32_t *sums = c.masses.key_sum + of_head;
    const float *scales = c.masses.key_scale + of_head;
    const float *bias = c.masses.bias ? c.masses.bias + head.b * c.masses.bias_stride[0] + head.kv * c.masses.bias_stride[1] : nullptr;
    const Rows<int8_t> rows = key_rows<int8_t>(c, head, {0, 0, 0, 0});
    for (int64_t begin = 0, segment = 0; begin < queries.limit; begin += length, segment++) {
        const int64_t end = min(begin + length, queries.limit);
        for (int64_t key = begin; key < end; key += BATCH) {
            const int count = (int)min(BATCH, end - key);
            int32_t some_sums[BATCH] = {};
            float some_scales[BATCH] = {}, some_bias[BATCH] = {};
            KeyBatch batch = {to.keys, width, sums + key, scales + key, bias ? bias + key : nullptr, key, count};
            bool plain = !bias && count == BATCH && key + BATCH <= queries.least;
            for (int k = 0; k < count; k++) plain &= scales[key + k] * queries.highest <= to.most;
            if (count < BATCH) {
                // Behind the last key of the tensor there is nothing to read.
                for (int k = 0; k < count; k++) some_sums[k] = sums[key + k], some_scales[k] = scales[key + k];
                for (int k = 0; bias && k < count; k++) some_bias[k] = bias[key + k];
                batch.sums = some_sums, batch.scale = some_scales, batch.bias = bias ? some_bias : nullptr;
            }
            if (sizeof(Part) == 1 && count == BATCH) batch.keys = (const Part *)rows.row(key), batch.stride = rows.step;
            else
                // Zeros in place of keys that are missing: sums of anything else could overflow.
                for (int k = 0; k < BATCH; k++)
                    for (int64_t d = 0; d < width; d++) to.keys[k * width + d] = k < count ? (Part)rows.row(key + k)[d] : Part();
            if (plain) weigh<true>(to, queries, batch, segment, key == begin);
            else weigh<false>(to, queries, batch, segment, key == begin);
        }
    }
}

// Up to PIECE queries of an output row.
struct Piece {
    int64_t row, first;
    int count;
};

// Add the squares of the shares of some pieces to their output rows, and count the queries that have one.
SHARED void rounded_strip(const ringtile_call &c, const Head &head, const Piece *pieces, int count, float *out,
                          int64_t *counted, RoundedScratch &to) {
    constexpr int L = Lanes<float>::count;
    const float low = -infinity<float>();
    const int64_t width = RoundedScratch::segments(c);
    const float *scale = c.masses.query_scale + head.number * c.n_queries;
    StripQueries queries = {};
    queries.least = c.n_keys;
    bool finite = true;
    for (int i = 0; i < count; i++) {
        const Piece piece = pieces[i];
        const Rows<int8_t> rows = query_rows<int8_t>(c, head, {piece.first, 0, piece.count, 0});
        for (int l = 0; l < piece.count; l++) {
            const int lane = i * PIECE + l;
            const int64_t seen = min(max(c.masses.seen[piece.first + l], 0), c.n_keys);
            queries.seen[lane] = (int32_t)seen;
            queries.factors[lane] = scale[piece.first + l];
            if (!(queries.factors[lane] <= queries.highest)) queries.highest = queries.factors[lane];
            finite &= is_finite(queries.factors[lane]);
            // Lanes that see nothing need no mask: they have no share.
            if (seen) queries.least = min(queries.least, seen);
            queries.limit = max(queries.limit, seen);
            for (int64_t w = 0; w < to.words; w++) to.queries[w * STRIP + lane] = query_word(rows.row(l) + w * WORD_DIMS);
        }
    }
    if (!finite) queries.highest = __builtin_nanf("");
    weigh_strip(c, head, queries, to);
    const int64_t segments = (queries.limit + c.masses.segment - 1) / c.masses.segment;
    Vec<float> share[STRIP_VECTORS];
    for (int n = 0; n < STRIP_VECTORS; n++) {
        Vec<float> highest = splat<float>(low), total = {};
        for (int64_t s = 0; s < segments; s++) highest = max<float>(highest, load(to.references + s * STRIP + n * L));
        for (int64_t s = 0; s < segments; s++) {
            // Differences of infinities are NaNs, which become 0.
            const Vec<float> above = (load(to.references + s * STRIP + n * L) - highest) * OCTAVE + ONE;
            const Vec<float> sum = load(to.sums + s * STRIP + n * L) * of_bits(above);
            store(to.sums + s * STRIP + n * L, sum);
            total += sum;
        }
        share[n] = total > 0 ? 1 / total : Vec<float>{};
        for (int l = 0; l < L; l++) {
            if (!queries.seen[n * L + l]) share[n][l] = 0;
            if (share[n][l] > 0) counted[pieces[(n * L + l) / PIECE].row]++;
        }
    }
    for (int i = 0; i < count; i++) {
        float *row = out + pieces[i].row * width;
        for (int64_t s = 0; s < segments; s++) {
            float squares[PIECE];
            for (int n = 0; n < PIECE / L; n++) {
                const Vec<float> own = share[i * PIECE / L + n], x = load(to.sums + s * STRIP + i * PIECE + n * L) * own;
                store(squares + n * L, own > 0 ? x * x : Vec<float>{});
            }
            for (int half = PIECE / 2; half; half /= 2)
                for (int l = 0; l < half; l++) squares[l] += squares[l + half];
            row[s] += squares[0];
        }
    }
}

// `pooled_step` output rows of a head. The last ones come first, because rows that see most are usually there.
inline void rounded_item(const ringtile_call &c, int64_t item, float *memory) {
    const int64_t heads = c.batch * c.heads, step = c.masses.pooled_step, items = (c.masses.n_pooled + step - 1) / step;
    const int64_t first = (items - 1 - item / heads) * step, last = min(first + step, c.masses.n_pooled);
    const Head head(c, item % heads);
    RoundedScratch to(c, memory);
    const int64_t width = RoundedScratch::segments(c);
    float *out = c.masses.sums + (head.number * c.masses.n_pooled + first) * width;
    for (int64_t i = 0; i < (last - first) * width; i++) out[i] = 0;
    for (int64_t row = first; row < last; row++) to.counted[row - first] = 0;
    Piece pieces[PIECES];
    int count = 0;
    for (int64_t row = first; row < last; row++)
        for (int64_t at = c.masses.pool_begin[row], end = c.masses.pool_begin[row + 1]; at < end; at += PIECE) {
            pieces[count++] = {row - first, at, (int)min(PIECE, end - at)};
            if (count == PIECES) rounded_strip(c, head, pieces, count, out, to.counted, to), count = 0;
        }
    if (count) rounded_strip(c, head, pieces, count, out, to.counted, to);
    for (int64_t i = 0; i < (last - first) * width; i++)
        out[i] = __builtin_sqrtf(out[i] / (float)max(to.counted[i / width], 1));
}

}  // namespace ISA
