// The backward pass, from the output and lse of the whole softmax. Two forms of one tile's work: by columns (keys in
// the
// lanes; gradients of keys and values, of queries too where a thread has a whole head) and by rows (queries in the
// lanes; gradients of queries). Both add the same products in the same order, so they agree to the last bit.
#pragma once
#include "dropout.h"
#include "matmul.h"

namespace ISA {

template <class T> struct BackwardScratch {
    static constexpr int L = Lanes<T>::count, GROUP = TILE_VECTORS * L;
    int64_t width;
    T *keys_t, *values_t, *keys, *keys_held, *key_sums, *value_sums, *queries, *out_grads, *query_sums, *scores, *grads;

    static int64_t padded(const ringtile_call &c) { return (c.head_dim + L - 1) / L * L; }
    static int64_t size(const ringtile_call &c) {
        return (3 * c.head_dim + 3 * c.value_dim + 3 * padded(c) + 2 * GROUP) * MAX_BLOCK;
    }

    BackwardScratch(const ringtile_call &c, T *x) : width(padded(c)) {
        T **places[] = {&keys, &keys_held, &query_sums, &scores, &grads, &keys_t, &key_sums, &queries, &values_t,
                        &value_sums, &out_grads};
        int64_t widths[] = {width, width, width, GROUP, GROUP, c.head_dim, c.head_dim, c.head_dim, c.value_dim,
                            c.value_dim, c.value_dim};
        for (int i = 0; i < 11; i++) {
            *places[i] = x;
            x += widths[i] * MAX_BLOCK;
        }
    }
};

// For every query of a head: rowsum(out_grad * out) - lse_grad, and lse in base 2; +inf where the query keeps nothing.
template <class E, class T> void delta_item(const ringtile_call &c, int64_t head) {
    int64_t b = head / c.heads, h = head % c.heads;
    Rows<E> out = rows_of<E>(c.out, c.out_stride, b, h, 0), grad = rows_of<E>(c.out_grad, c.out_grad_stride, b, h, 0);
    const T *lse = (const T *)c.lse + head * c.n_queries;
    const T *lse_grad = c.lse_grad ? (const T *)c.lse_grad + head * c.n_queries : nullptr;
    T *delta = (T *)c.delta + 2 * head * c.n_queries, *lse2 = delta + c.n_queries;
    for (int64_t i = 0; i < c.n_queries; i++) {
        bool empty = lse[i] == -infinity<T>();
        T sum = 0;
        for (int64_t d = 0; d < c.value_dim && !empty; d++)
            sum += (T)widen(out.x[i * out.step + d]) * (T)widen(grad.x[i * grad.step + d]);
        delta[i] = empty ? T(0) : lse_grad ? sum - lse_grad[i] : sum;
        lse2[i] = empty ? infinity<T>() : lse[i] * T(1.44269504088896340736);
    }
}

template <class T> struct Step {
    T base, scale, kept;
    const int32_t *bits;     // of the tile, a row of `words` for each token that is not in the lanes
    int words;
    const uint32_t *dead;    // keys
    const uint32_t (*keep)[MAX_WORDS];
};

// Scores and products of out_grad and values [count][GROUP] become dropped weights and gradients of scores.
// KEYS: keys are in the lanes, queries (from lane `first` of their tile on) in the rows; else the other way around.
template <class T, int N, bool KEYS>
void grade(T *scores, T *grads, int first, int count, int lane, const Step<T> &step, const T *lse2, const T *delta) {
    constexpr int L = Lanes<T>::count, GROUP = TILE_VECTORS * L;
    for (int i = 0; i < count; i++) {
        int other = first + i;
        bool dropped = !KEYS && step.dead && (step.dead[other >> 5] >> (other & 31) & 1);
        for (int n = 0; n < N; n++) {
            int at = lane + n * L;
            Vec<T> s = load(scores + i * GROUP + n * L), g = load(grads + i * GROUP + n * L);
            Vec<T> high = KEYS ? splat<T>(lse2[other]) : load(lse2 + at),
                mean = KEYS ? splat<T>(delta[other]) : load(delta + at);
            Vec<T> p = exp2<T>(s * step.base - high), q = p;
            if (step.keep) {
                Whole<T> keep = lanes_of<T>((const int32_t *)step.keep[other], at);
                q = keep ? p * step.kept : Vec<T>{};
                g = keep ? g * step.kept : Vec<T>{};
            }
            g = p * (g - mean) * step.scale;
            if (step.bits || step.dead) {
                Whole<T> kept = step.bits ? lanes_of<T>(step.bits + other * step.words, at) : ~Whole<T>{};
                if (KEYS && step.dead) kept &= ~lanes_of<T>((const int32_t *)step.dead, at);
                if (dropped) kept = Whole<T>{};
                q = kept ? q : Vec<T>{};
                g = kept ? g : Vec<T>{};
            }
            store(scores + i * GROUP + n * L, q);
            store(grads + i * GROUP + n * L, g);
        }
    }
}

template <class T, bool KEYS>
INLINE void grade_group(int vectors, T *scores, T *grads, int first, int count, int lane, const Step<T> &step,
                        const T *lse2, const T *delta) {
    switch (vectors) {
    case 1: grade<T, 1, KEYS>(scores, grads, first, count, lane, step, lse2, delta); break;
    case 2: grade<T, 2, KEYS>(scores, grads, first, count, lane, step, lse2, delta); break;
#if !defined(__AVX2__) || defined(__AVX512F__)
    case 3: grade<T, 3, KEYS>(scores, grads, first, count, lane, step, lse2, delta); break;
    case 4: grade<T, 4, KEYS>(scores, grads, first, count, lane, step, lse2, delta); break;
#endif
    default: break;
    }
}

// What a tile keeps nothing of: keys and queries as bit sets, and whether there are any.
struct Unused {
    uint32_t keys[MAX_WORDS], queries[MAX_WORDS];
    bool masked_keys, any_keys, any_queries;
};

template <class T>
INLINE Unused unused_of(const ringtile_call &c, int64_t b, Span queries, Span keys, int64_t tile, const T *lse2) {
    Unused u = {};
    u.masked_keys = dropped_keys(c, b, keys, u.keys);
    if (tile >= 0) {
        unused_tokens(c, c.cols_any, c.bits_t, tile, keys, queries, u.keys);
        unused_tokens(c, c.rows_any, c.bits, tile, queries, keys, u.queries);
    }
    for (int q = queries.low; q < queries.high; q++)
        u.queries[q >> 5] |= (uint32_t)(lse2[q] == infinity<T>()) << (q & 31);
    for (int k = 0; k < keys.high; k++) u.any_keys |= u.keys[k >> 5] >> (k & 31) & 1;
    for (int q = queries.low; q < queries.high; q++) u.any_queries |= u.queries[q >> 5] >> (q & 31) & 1;
    return u;
}

template <class T>
INLINE Step<T> step_of(const ringtile_call &c, const int32_t *bits, int64_t tile, const Unused &u,
                       const uint32_t (*keep)[MAX_WORDS]) {
    int words = (c.block + 31) / 32;
    T base = (T)(c.scale * 1.44269504088896340736), kept = (T)(65536.0 / (65536 - c.dropout_threshold));
    return {base, (T)c.scale, kept, tile >= 0 ? bits + tile * c.block * words : nullptr, words,
            u.masked_keys ? u.keys : nullptr, keep};
}

// Shift a bit set of a tile so that the row of lane `low` comes first.
INLINE void shifted(const uint32_t *bits, int low, uint32_t *out) {
    for (int w = 0; w < MAX_WORDS; w++) out[w] = 0;
    for (int i = low; i < MAX_BLOCK; i++) out[(i - low) >> 5] |= (bits[i >> 5] >> (i & 31) & 1) << ((i - low) & 31);
}

// One column tile and head: sums of key and value gradients, and the gradients of queries where `query_grad` is given.
template <class E, class T>
void column_tiles(const ringtile_call &c, int64_t b, int64_t h, int64_t kv, int64_t col, BackwardScratch<T> &to,
                  T *query_grad) {
    constexpr int L = Lanes<T>::count, GROUP = TILE_VECTORS * L;
    constexpr bool same = sizeof(E) == sizeof(T);
    int64_t head = b * c.heads + h, row, tile;
    Span keys = col_span(c, col);
    int end = (keys.high + L - 1) / L * L;
    Tiles tiles = tiles_of(c.full_col_ptr, c.full_row, c.part_col_ptr, c.part_row, c.part_tile_t,
                           group_of(c, b, h) * c.n_cols + col);
    Dropout random = dropout_of(c, b, h);
    Rows<E> key_rows = rows_of<E>(c.k, c.k_stride, b, kv, keys.first);
    while (tiles.next(row, tile)) {
        Span queries = row_span(c, row);
        int low = queries.low, count = queries.high - low;
        int64_t first = queries.first + low;
        const T *delta = (const T *)c.delta + 2 * head * c.n_queries + queries.first, *lse2 = delta + c.n_queries;
        Unused u = unused_of(c, b, queries, keys, tile, lse2);
        uint32_t keep[MAX_BLOCK][MAX_WORDS];
        if (c.dropout_threshold) dropout_bits<true>(random, c, queries, keys, keep);
        Step<T> step = step_of<T>(c, c.bits, tile, u, c.dropout_threshold ? keep : nullptr);
        Rows<E> query_rows = rows_of<E>(c.q, c.q_stride, b, h, first),
            grad_rows = rows_of<E>(c.out_grad, c.out_grad_stride, b, h, first);
        const T *query = (const T *)query_rows.x, *grad = (const T *)grad_rows.x, *key = to.keys;
        int64_t query_step = query_rows.step, grad_step = grad_rows.step;
        if (!same || u.any_queries) {
            uint32_t dead[MAX_WORDS];
            shifted(u.queries, low, dead);
            copy_in(query_rows, count, c.head_dim, c.head_dim, dead, to.queries);
            copy_in(grad_rows, count, c.value_dim, c.value_dim, dead, to.out_grads);
            query = to.queries, query_step = c.head_dim, grad = to.out_grads, grad_step = c.value_dim;
        }
        if (query_grad && u.any_keys) {
            copy_in(key_rows, keys.high, c.head_dim, to.width, u.keys, to.keys_held);
            key = to.keys_held;
        }
        T *sums = query_grad ? query_grad + first * c.head_dim : nullptr;
        bool direct = to.width == c.head_dim;
        if (sums && !direct) copy_in(Rows<T>{sums, c.head_dim}, count, c.head_dim, to.width, nullptr, to.query_sums);
        for (int lane = 0; lane < end; lane += GROUP) {
            int vectors = (int)least(TILE_VECTORS, (end - lane) / L);
            matmul<T, true>(vectors, query, query_step, to.keys_t + lane, MAX_BLOCK, to.scores, GROUP, count,
                            c.head_dim, false);
            matmul<T, true>(vectors, grad, grad_step, to.values_t + lane, MAX_BLOCK, to.grads, GROUP, count,
                            c.value_dim, false);
            grade_group<T, true>(vectors, to.scores, to.grads, low, count, lane, step, lse2, delta);
            matmul<T, false>(vectors, grad, grad_step, to.scores, GROUP, to.value_sums + lane, MAX_BLOCK, c.value_dim,
                             count, true);
            matmul<T, false>(vectors, query, query_step, to.grads, GROUP, to.key_sums + lane, MAX_BLOCK, c.head_dim,
                             count, true);
            if (!sums) continue;
            T *place = direct ? sums : to.query_sums;
            for (int64_t d = 0; d < to.width; d += GROUP)
                matmul<T, true>((int)least(TILE_VECTORS, (to.width - d) / L), to.grads, GROUP,
                                key + lane * to.width + d, to.width, place + d, to.width, count,
                                least(GROUP, keys.high - lane), true);
        }
        if (sums && !direct)
            for (int i = 0; i < count; i++)
                __builtin_memcpy(sums + i * c.head_dim, to.query_sums + i * to.width, c.head_dim * sizeof(T));
    }
}

// The gradients of one column tile of a key head, all query heads that it serves summed in their order.
template <class E, class T>
void column(const ringtile_call &c, int64_t b, int64_t kv, int64_t col, T *memory, bool queries) {
    BackwardScratch<T> to(c, memory);
    int64_t ratio = c.heads / c.kv_heads;
    Span keys = col_span(c, col);
    Rows<E> key_rows = rows_of<E>(c.k, c.k_stride, b, kv, keys.first);
    Rows<E> value_rows = rows_of<E>(c.v, c.v_stride, b, kv, keys.first);
    uint32_t dead[MAX_WORDS];
    bool masked = dropped_keys(c, b, keys, dead);
    transpose_in(key_rows, 0, keys.high, 0, MAX_BLOCK, c.head_dim, T(1), to.keys_t, MAX_BLOCK);
    transpose_in(value_rows, 0, keys.high, 0, MAX_BLOCK, c.value_dim, T(1), to.values_t, MAX_BLOCK);
    if (queries) copy_in(key_rows, keys.high, c.head_dim, to.width, masked ? dead : nullptr, to.keys);
    for (int64_t i = 0; i < c.head_dim * MAX_BLOCK; i++) to.key_sums[i] = 0;
    for (int64_t i = 0; i < c.value_dim * MAX_BLOCK; i++) to.value_sums[i] = 0;
    for (int64_t h = kv * ratio; h < (kv + 1) * ratio; h++)
        column_tiles<E, T>(c, b, h, kv, col, to,
                           queries ? (T *)c.q_grad + (b * c.heads + h) * c.n_queries * c.head_dim : nullptr);
    T *key_grad = (T *)c.k_grad + ((b * c.kv_heads + kv) * c.n_keys + keys.first) * c.head_dim;
    T *value_grad = (T *)c.v_grad + ((b * c.kv_heads + kv) * c.n_keys + keys.first) * c.value_dim;
    for (int i = 0; i < keys.high; i++) {
        for (int64_t d = 0; d < c.head_dim; d++) key_grad[i * c.head_dim + d] = to.key_sums[d * MAX_BLOCK + i];
        for (int64_t d = 0; d < c.value_dim; d++) value_grad[i * c.value_dim + d] = to.value_sums[d * MAX_BLOCK + i];
    }
}

// Columns of a key head (`item`), gradients of its queries included: five products a tile instead of seven.
template <class E, class T> void head_item(const ringtile_call &c, int64_t item, T *memory) {
    for (int64_t col = c.first_col; col < c.last_col; col++)
        column<E, T>(c, item / c.kv_heads, item % c.kv_heads, col, memory, true);
}

template <class E, class T> void column_item(const ringtile_call &c, int64_t item, T *memory) {
    int64_t head = item / c.n_cols;
    column<E, T>(c, head / c.kv_heads, head % c.kv_heads, item % c.n_cols, memory, false);
}

// The gradients of one row tile of queries.
template <class E, class T> void row_item(const ringtile_call &c, int64_t item, T *memory) {
    constexpr int L = Lanes<T>::count, GROUP = TILE_VECTORS * L;
    constexpr bool same = sizeof(E) == sizeof(T);
    BackwardScratch<T> to(c, memory);
    int64_t head = item / c.n_rows, row = item % c.n_rows, b = head / c.heads, h = head % c.heads,
        kv = h / (c.heads / c.kv_heads);
    Span queries = row_span(c, row);
    int from = queries.low / L * L, end = (queries.high + L - 1) / L * L;
    const T *delta = (const T *)c.delta + 2 * head * c.n_queries + queries.first, *lse2 = delta + c.n_queries;
    // Lanes without a query hold lse +inf, so that nothing comes of them.
    T highs[MAX_BLOCK], means[MAX_BLOCK];
    for (int lane = from; lane < end; lane++) {
        bool inside = lane >= queries.low && lane < queries.high;
        highs[lane] = inside ? lse2[lane] : infinity<T>();
        means[lane] = inside ? delta[lane] : T(0);
    }
    transpose_in(rows_of<E>(c.q, c.q_stride, b, h, queries.first + queries.low), queries.low, queries.high, from, end,
                 c.head_dim, T(1), to.queries, MAX_BLOCK);
    transpose_in(rows_of<E>(c.out_grad, c.out_grad_stride, b, h, queries.first + queries.low), queries.low,
                 queries.high, from, end, c.value_dim, T(1), to.out_grads, MAX_BLOCK);
    T *sums = to.key_sums;
    for (int64_t i = 0; i < c.head_dim * MAX_BLOCK; i++) sums[i] = 0;
    Dropout random = dropout_of(c, b, h);
    Tiles tiles = tiles_of(c.full_row_ptr, c.full_col, c.part_row_ptr, c.part_col, c.part_tile,
                           group_of(c, b, h) * c.n_rows + row);
    int64_t col, tile;
    while (tiles.next(col, tile)) {
        Span keys = col_span(c, col);
        Unused u = unused_of(c, b, queries, keys, tile, lse2);
        uint32_t keep[MAX_BLOCK][MAX_WORDS];
        if (c.dropout_threshold) dropout_bits<false>(random, c, queries, keys, keep);
        Step<T> step = step_of<T>(c, c.bits_t, tile, u, c.dropout_threshold ? keep : nullptr);
        Rows<E> key_rows = rows_of<E>(c.k, c.k_stride, b, kv, keys.first);
        Rows<E> value_rows = rows_of<E>(c.v, c.v_stride, b, kv, keys.first);
        const T *key = (const T *)key_rows.x, *value = (const T *)value_rows.x;
        int64_t key_step = key_rows.step, value_step = value_rows.step;
        if (!same || u.any_keys) {
            const uint32_t *dead = u.any_keys ? u.keys : nullptr;
            copy_in(key_rows, keys.high, c.head_dim, c.head_dim, dead, to.keys);
            copy_in(value_rows, keys.high, c.value_dim, c.value_dim, dead, to.values_t);
            key = to.keys, key_step = c.head_dim;
            value = to.values_t, value_step = c.value_dim;
        }
        for (int lane = from; lane < end; lane += GROUP) {
            int vectors = (int)least(TILE_VECTORS, (end - lane) / L);
            matmul<T, true>(vectors, key, key_step, to.queries + lane, MAX_BLOCK, to.scores, GROUP, keys.high,
                            c.head_dim, false);
            matmul<T, true>(vectors, value, value_step, to.out_grads + lane, MAX_BLOCK, to.grads, GROUP, keys.high,
                            c.value_dim, false);
            grade_group<T, false>(vectors, to.scores, to.grads, 0, keys.high, lane, step, highs, means);
            matmul<T, false>(vectors, key, key_step, to.grads, GROUP, sums + lane, MAX_BLOCK, c.head_dim, keys.high,
                             true);
        }
    }
    T *grad = (T *)c.q_grad + (head * c.n_queries + queries.first) * c.head_dim;
    for (int lane = queries.low; lane < queries.high; lane++) {
        bool empty = lse2[lane] == infinity<T>();
        for (int64_t d = 0; d < c.head_dim; d++)
            grad[lane * c.head_dim + d] = empty ? T(0) : sums[d * MAX_BLOCK + lane];
    }
}

}  // namespace ISA
