// Scores of queries and keys that are rounded to 8 bits, summed over the heads: those by which an indexer chooses keys.
#pragma once
#include "rounded.h"

namespace ISA {

constexpr int64_t ITEM_QUERIES = 32, ITEM_KEYS = 1024;

struct ScoreScratch {
    int64_t words;
    Word *queries;   // [heads][words][STRIP]
    float *factors;  // [heads][STRIP]
    Part *keys;      // [BATCH][words * WORD_DIMS]

    static int64_t size(const ringtile_call &c) {
        return c.heads * (c.head_dim / WORD_DIMS + 1) * STRIP + c.head_dim * BATCH;
    }
    ScoreScratch(const ringtile_call &c, float *x) : words(c.head_dim / WORD_DIMS) {
        queries = (Word *)x;
        factors = x + c.heads * words * STRIP;
        keys = (Part *)(factors + c.heads * STRIP);
    }
};

// Add a head's products of a batch of keys to sums [key][vector], times the factors of the queries.
template <bool RELU>
SHARED void add_scores(const ScoreScratch &from, int64_t head, const int32_t *key_sums, Vec<float> *to) {
    constexpr int L = Lanes<float>::count;
    const Word *queries = from.queries + head * from.words * STRIP;
    const float *factors = from.factors + head * STRIP;
    Products products;
    multiply(queries, from.keys, from.words * WORD_DIMS, from.words, key_sums, products);
    // A loop that is not unrolled keeps the products in memory.
#pragma GCC unroll 4
    for (int n = 0; n < STRIP_VECTORS; n++) {
        const Vec<float> factor = load(factors + n * L);
        for (int k = 0; k < BATCH; k++) {
            const Vec<float> product = __builtin_convertvector(products[k][n], Vec<float>);
            to[k * STRIP_VECTORS + n] += (RELU ? max<float>(product, Vec<float>{}) : product) * factor;
        }
    }
}

// A key, zeros if there is none.
INLINE void copy_key(const int8_t *__restrict key, int64_t width, Part *__restrict to) {
    if (key)
        for (int64_t d = 0; d < width; d++) to[d] = (Part)key[d];
    else
        for (int64_t d = 0; d < width; d++) to[d] = Part();
}

// The scores of a strip's queries for keys from `begin` to `end`.
inline void score_strip(const ringtile_call &c, int64_t query, int64_t begin, int64_t end, const ScoreScratch &to) {
    constexpr int L = Lanes<float>::count;
    const int64_t width = to.words * WORD_DIMS;
    const int count = (int)min(STRIP, c.n_queries - query);
    for (int64_t h = 0; h < c.heads; h++) {
        const Rows<int8_t> rows = rows_of<int8_t>(c.q, c.q_stride, 0, h, {query, 0, count, 0});
        for (int lane = 0; lane < STRIP; lane++) {
            to.factors[h * STRIP + lane] = lane < count ? c.masses.query_scale[h * c.n_queries + query + lane] : 0;
            // Zeros in lanes without a query: sums of anything else could overflow.
            for (int64_t w = 0; w < to.words; w++)
                to.queries[(h * to.words + w) * STRIP + lane] = lane < count ? query_word(rows.row(lane) + w * WORD_DIMS) : Word();
        }
    }
    const Rows<int8_t> keys = rows_of<int8_t>(c.k, c.k_stride, 0, 0, {0, 0, 0, 0});
    for (int64_t first = begin; first < end; first += L) {
        Vec<float> sums[L * STRIP_VECTORS] = {};
        for (int batch = 0; batch < L; batch += BATCH) {
            int32_t key_sums[BATCH];
            for (int k = 0; k < BATCH; k++) {
                const int64_t key = first + batch + k;
                key_sums[k] = key < end ? c.masses.key_sum[key] : 0;
                copy_key(key < end ? keys.row(key) : nullptr, width, to.keys + k * width);
            }
            for (int64_t h = 0; h < c.heads; h++) {
                if (c.masses.relu) add_scores<true>(to, h, key_sums, sums + batch * STRIP_VECTORS);
                else add_scores<false>(to, h, key_sums, sums + batch * STRIP_VECTORS);
            }
        }
        const int some = (int)min(L, end - first);
        float units[L];
        for (int k = 0; k < L; k++) units[k] = k < some ? c.masses.key_scale[first + k] : 0;
        for (int n = 0; n < STRIP_VECTORS; n++) {
            Vec<float> x[L];
            for (int k = 0; k < L; k++) x[k] = sums[k * STRIP_VECTORS + n];
            transpose_square<float>(x);
            for (int l = 0; l < L && n * L + l < count; l++) {
                float *row = c.masses.sums + (query + n * L + l) * c.out_stride[2] + first;
                const Vec<float> scores = x[l] * load(units);
                if (some == L) store(row, scores);
                else
                    for (int k = 0; k < some; k++) row[k] = scores[k];
            }
        }
    }
}

inline void score_item(const ringtile_call &c, int64_t item, float *memory) {
    const int64_t items = (c.n_queries + ITEM_QUERIES - 1) / ITEM_QUERIES, first = item % items * ITEM_QUERIES;
    const int64_t begin = item / items * ITEM_KEYS, end = min(begin + ITEM_KEYS, c.n_keys);
    const ScoreScratch to(c, memory);
    for (int64_t query = first; query < min(first + ITEM_QUERIES, c.n_queries); query += STRIP)
        score_strip(c, query, begin, end, to);
}

}  // namespace ISA
