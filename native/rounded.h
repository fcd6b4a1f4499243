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

// 2^x for x up to 0 within 0.2 %, which is less than what rounding to 8 bits costs. Far below 0 it is nearly 0.
INLINE Vec<float> roughly_exp2(Vec<float> x) {
#if defined(__AVX512F__)
    // Of -inf, the fraction is 0.
    const Vec<float> f = (Vec<float>)_mm512_maskz_reduce_ps(0xffff, (__m512)x, _MM_FROUND_TO_NEG_INF);
    const Vec<float> p = (0.33718945f * f + 0.65763641f) * f + 1.0017247f;
    return (Vec<float>)_mm512_maskz_scalef_ps(0xffff, (__m512)p, (__m512)x);
#else
    const float magic = 12582912.0f + 127;
    x = x < -126.0f ? splat<float>(-126) : x;
    const Vec<float> whole = x + magic, f = x - (whole - magic), p = (0.23842895f * f + 0.70344811f) * f + 1.00044315f;
    return p * (Vec<float>)((Ints<float>)whole << 23);
#endif
}

INLINE bool is_finite(float x) { return x <= 3.402823466e38f; }

// A batch is up to BATCH keys of a segment, and has an entry: for each query of a strip, the sum of its weights over
// 2^(reference * factor), and the reference, its highest score.
struct RoundedScratch {
    int64_t words, of_segment;  // the words of a row, the entries of a segment
    Word *queries;              // [words][STRIP]
    Part *keys;                 // [BATCH][words * WORD_DIMS]
    float *sums, *references;   // [entries][STRIP]
    int64_t *counted;           // queries of each output row that have a share

    static int64_t segments(const ringtile_call &c) { return (c.n_keys + c.masses.segment - 1) / c.masses.segment; }
    static int64_t entries(const ringtile_call &c) { return (c.masses.segment + BATCH - 1) / BATCH * segments(c); }
    static int64_t size(const ringtile_call &c) {
        return c.head_dim / WORD_DIMS * (STRIP + BATCH * WORD_DIMS) + 2 * entries(c) * STRIP + 2 * c.masses.pooled_step;
    }
    RoundedScratch(const ringtile_call &c, float *x)
        : words(c.head_dim / WORD_DIMS), of_segment((c.masses.segment + BATCH - 1) / BATCH) {
        sums = x;
        references = sums + entries(c) * STRIP;
        queries = (Word *)(references + entries(c) * STRIP);
        counted = (int64_t *)(queries + words * STRIP);
        keys = (Part *)(counted + c.masses.pooled_step);
        // Lanes without a query are multiplied, too: sums of anything else could overflow.
        for (int64_t i = 0; i < words * STRIP; i++) queries[i] = Word();
    }
};

// What a strip's queries see, and the factors of their scores.
struct StripQueries {
    int32_t seen[STRIP];
    float factors[STRIP];
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

// The best or the sum of COUNT vectors, in pairs. Compilers leave a loop over halves in memory.
template <int COUNT, class F> INLINE Vec<float> reduced(const Vec<float> *x, F join) {
    if constexpr (COUNT == 1) return x[0];
    else return join(reduced<COUNT / 2>(x, join), reduced<COUNT / 2>(x + COUNT / 2, join));
}

// Set the entry of a batch. PLAIN: all queries see all of its keys, and each has a finite scale. Out of line, so that all
// sums stay in registers.
template <bool PLAIN>
SHARED void weigh(const RoundedScratch &to, const StripQueries &queries, const KeyBatch &batch, int64_t entry) {
    constexpr int L = Lanes<float>::count;
    const float low = -infinity<float>();
    Sums products[BATCH][STRIP_VECTORS];
    for (int k = 0; k < BATCH; k++)
        for (int n = 0; n < STRIP_VECTORS; n++) products[k][n] = start_of(batch.sums[k]);
    for (int64_t w = 0; w < to.words; w++) {
        Sums query[STRIP_VECTORS];
        for (int n = 0; n < STRIP_VECTORS; n++) query[n] = *(const Sums *)(to.queries + w * STRIP + n * L);
        for (int k = 0; k < BATCH; k++) {
            Word key;
            __builtin_memcpy(&key, batch.keys + k * batch.stride + w * WORD_DIMS, sizeof(Word));
            for (int n = 0; n < STRIP_VECTORS; n++) products[k][n] = add_product(products[k][n], query[n], key);
        }
    }
    for (int n = 0; n < STRIP_VECTORS; n++) {
        const Vec<float> factors = load(queries.factors + n * L);
        Ints<float> limits;
        for (int l = 0; l < L; l++) limits[l] = queries.seen[n * L + l];
        Vec<float> scores[BATCH];
        for (int k = 0; k < BATCH; k++) {
            scores[k] = __builtin_convertvector(products[k][n], Vec<float>) * batch.scale[k];
            if (!PLAIN) {
                // A key with a NaN or an infinity: queries that see it become 0.
                if (!is_finite(batch.scale[k])) scores[k] = splat<float>(infinity<float>());
                if (batch.bias && batch.bias[k] == low) scores[k] = splat<float>(low);
                scores[k] = limits > (int32_t)(batch.first + k) ? scores[k] : splat<float>(low);
                if (k >= batch.count) scores[k] = splat<float>(low);
            }
        }
        const Vec<float> reference = reduced<BATCH>(scores, [](Vec<float> x, Vec<float> y) INLINE_LAMBDA { return max<float>(x, y); });
        const Vec<float> base = rounded<float>((reference == low ? Vec<float>{} : reference) * factors);
        for (int k = 0; k < BATCH; k++) {
            const Vec<float> weight = roughly_exp2(scores[k] * factors - base);
            // With a factor of 0, a score of -inf would become a NaN.
            scores[k] = PLAIN ? weight : (scores[k] == low ? Vec<float>{} : weight);
        }
        store(to.references + entry * STRIP + n * L, reference);
        store(to.sums + entry * STRIP + n * L, reduced<BATCH>(scores, [](Vec<float> x, Vec<float> y) INLINE_LAMBDA { return x + y; }));
    }
}

// Set the entries of a strip, up to the last key that one of its queries sees.
SHARED void weigh_strip(const ringtile_call &c, const Head &head, const StripQueries &queries, RoundedScratch &to) {
    const int64_t length = c.masses.segment, of_head = (head.b * c.kv_heads + head.kv) * c.n_keys, width = to.words * WORD_DIMS;
    const int32_t *sums = c.masses.key_sum + of_head;
    const float *scales = c.masses.key_scale + of_head;
    const float *bias = c.masses.bias ? c.masses.bias + head.b * c.masses.bias_stride[0] + head.kv * c.masses.bias_stride[1] : nullptr;
    const Rows<int8_t> rows = key_rows<int8_t>(c, head, {0, 0, 0, 0});
    int64_t entry = 0;
    for (int64_t begin = 0; begin < queries.limit; begin += length) {
        const int64_t end = min(begin + length, queries.limit);
        for (int64_t key = begin; key < end; key += BATCH, entry++) {
            const int count = (int)min(BATCH, end - key);
            int32_t some_sums[BATCH] = {};
            float some_scales[BATCH] = {}, some_bias[BATCH] = {};
            KeyBatch batch = {to.keys, width, sums + key, scales + key, bias ? bias + key : nullptr, key, count};
            bool plain = !bias && count == BATCH && key + BATCH <= queries.least;
            for (int k = 0; k < count; k++) plain &= is_finite(scales[key + k]);
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
            if (plain) weigh<true>(to, queries, batch, entry);
            else weigh<false>(to, queries, batch, entry);
        }
        // A segment that ends early has fewer batches than entries.
        for (; entry % to.of_segment; entry++)
            for (int lane = 0; lane < STRIP; lane++) to.references[entry * STRIP + lane] = -infinity<float>();
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
    for (int i = 0; i < count; i++) {
        const Piece piece = pieces[i];
        const Rows<int8_t> rows = query_rows<int8_t>(c, head, {piece.first, 0, piece.count, 0});
        for (int l = 0; l < piece.count; l++) {
            const int lane = i * PIECE + l;
            const int64_t seen = min(max(c.masses.seen[piece.first + l], 0), c.n_keys);
            queries.seen[lane] = (int32_t)seen;
            queries.factors[lane] = scale[piece.first + l];
            // Lanes that see nothing need no mask: they have no share.
            if (seen) queries.least = min(queries.least, seen);
            queries.limit = max(queries.limit, seen);
            for (int64_t w = 0; w < to.words; w++) to.queries[w * STRIP + lane] = query_word(rows.row(l) + w * WORD_DIMS);
        }
    }
    weigh_strip(c, head, queries, to);
    const int64_t segments = (queries.limit + c.masses.segment - 1) / c.masses.segment, entries = segments * to.of_segment;
    Vec<float> share[STRIP_VECTORS];
    for (int n = 0; n < STRIP_VECTORS; n++) {
        Vec<float> highest = splat<float>(low), total = {};
        for (int64_t at = n * L; at < entries * STRIP; at += STRIP) highest = max<float>(highest, load(to.references + at));
        const Vec<float> safe = highest == low ? Vec<float>{} : highest, factors = load(queries.factors + n * L);
        for (int64_t s = 0; s < segments; s++) {
            Vec<float> sum = {};
            for (int64_t entry = s * to.of_segment; entry < (s + 1) * to.of_segment; entry++) {
                const Vec<float> reference = load(to.references + entry * STRIP + n * L);
                const Vec<float> more = load(to.sums + entry * STRIP + n * L) * exp2<float>((reference - safe) * factors);
                sum += reference == low ? Vec<float>{} : more;
            }
            // Entries before this one have been read.
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
    float *out = (float *)c.out + (head.number * c.masses.n_pooled + first) * width;
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
