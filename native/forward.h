// The forward pass. A row tile's queries lie in the lanes of vectors, so scores are [key][query]: the softmax runs
// along rows of vectors, and neither keys nor values have to be packed.
#pragma once
#include "dropout.h"
#include "few.h"
#include "pairs.h"

namespace ISA {

template <class T> struct ForwardScratch {
    T *queries, *sums, *scores, *keys, *values, *highest, *total, *few;

    static int64_t size(const ringtile_call &c) {
        return (c.head_dim + most(c.head_dim, GROUP) + 2 * c.value_dim + GROUP + 2) * MAX_BLOCK +
               FEW_QUERIES * (c.head_dim + c.value_dim + MAX_BLOCK);
    }
    static constexpr int GROUP = TILE_VECTORS * Lanes<T>::count;

    ForwardScratch(const ringtile_call &c, T *x) {
        queries = x;
        sums = queries + c.head_dim * MAX_BLOCK;
        scores = sums + c.value_dim * MAX_BLOCK;
        keys = scores + GROUP * MAX_BLOCK;
        values = keys + most(c.head_dim, GROUP) * MAX_BLOCK;
        highest = values + c.value_dim * MAX_BLOCK;
        total = highest + MAX_BLOCK;
        few = total + MAX_BLOCK;
    }
};

// Which pairs of a tile are kept, for lanes of queries: a row of bits for each key (or none), keys dropped for all.
struct Mask {
    const int32_t *bits;
    int words;
    const uint32_t *dead;
    int first;  // the key that the first row of scores is of

    INLINE bool drops(int row) const { return dead && (dead[(first + row) >> 5] >> ((first + row) & 31) & 1); }
    INLINE const int32_t *kept(int row) const { return bits + (first + row) * words; }
};

// One step of the online softmax over `count` keys: scores [count][GROUP] become weights; highest, total and the sums
// [value_dim][MAX_BLOCK] are brought up to date.
template <class T, int N>
void soften(T *scores, int count, int lane, T scale, const Mask *mask, T *highest, T *total, T *sums,
            int64_t value_dim) {
    constexpr int L = Lanes<T>::count, GROUP = TILE_VECTORS * L;
    const T low = -infinity<T>();
    Vec<T> top[N];
    for (int n = 0; n < N; n++) top[n] = splat<T>(low);
    if (mask) {
        for (int k = 0; k < count; k++) {
            T *row = scores + k * GROUP;
            bool dropped = mask->drops(k);
            for (int n = 0; n < N; n++) {
                Vec<T> s = dropped ? splat<T>(low) : load(row + n * L);
                if (mask->bits && !dropped)
                    s = lanes_of<T>(mask->kept(k), lane + n * L) ? s : splat<T>(low);
                store(row + n * L, s);
                top[n] = larger<T>(top[n], s);
            }
        }
    } else {
        for (int k = 0; k < count; k++)
            for (int n = 0; n < N; n++) top[n] = larger<T>(top[n], load(scores + k * GROUP + n * L));
    }
    Vec<T> sum[N] = {}, safe[N];
    bool moved = false;
    for (int n = 0; n < N; n++) {
        Vec<T> before = load(highest + lane + n * L), now = larger<T>(before, top[n] * scale);
        store(highest + lane + n * L, now);
        safe[n] = now == low ? Vec<T>{} : now;
        Whole<T> rose = now > before;
        typename Lanes<T>::integer any = 0;
        for (int i = 0; i < L; i++) any |= rose[i];
        top[n] = exp2<T>(before - safe[n]);
        moved |= any != 0;
    }
    if (moved) {
        for (int64_t d = 0; d < value_dim; d++)
            for (int n = 0; n < N; n++) {
                T *at = sums + d * MAX_BLOCK + lane + n * L;
                store(at, load(at) * top[n]);
            }
    }
    for (int k = 0; k < count; k++) {
        for (int n = 0; n < N; n++) {
            T *at = scores + k * GROUP + n * L;
            Vec<T> s = load(at), p = exp2<T>(s * scale - safe[n]);
            if (mask) p = s == low ? Vec<T>{} : p;
            store(at, p);
            sum[n] += p;
        }
    }
    for (int n = 0; n < N; n++) {
        T *at = total + lane + n * L;
        store(at, load(at) * top[n] + sum[n]);
    }
}

template <class T>
INLINE void soften_group(int vectors, T *scores, int count, int lane, T scale, const Mask *mask, T *highest, T *total,
                         T *sums, int64_t value_dim) {
    switch (vectors) {
    case 1: soften<T, 1>(scores, count, lane, scale, mask, highest, total, sums, value_dim); break;
    case 2: soften<T, 2>(scores, count, lane, scale, mask, highest, total, sums, value_dim); break;
#if !defined(__AVX2__) || defined(__AVX512F__)
    case 3: soften<T, 3>(scores, count, lane, scale, mask, highest, total, sums, value_dim); break;
    case 4: soften<T, 4>(scores, count, lane, scale, mask, highest, total, sums, value_dim); break;
#endif
    default: break;
    }
}

template <class E, class T>
void write_row(const ringtile_call &c, int64_t b, int64_t h, Span queries, const T *sums, const T *highest,
               const T *total) {
    E *out = (E *)c.out + b * c.out_stride[0] + h * c.out_stride[1] + queries.first * c.out_stride[2];
    T *lse = (T *)c.lse + (b * c.heads + h) * c.n_queries + queries.first;
    T kept = c.dropout_threshold ? T(65536.0 / (65536 - c.dropout_threshold)) : T(1), share[MAX_BLOCK] = {};
    for (int lane = queries.low; lane < queries.high; lane++) {
        bool empty = highest[lane] == -infinity<T>() && total[lane] == 0;
        share[lane] = empty ? T(0) : kept / total[lane];
        lse[lane] = empty ? -infinity<T>() : highest[lane] * T(0.69314718055994530942) + exact_log(total[lane]);
    }
    transpose_out<E, T>(sums, c.value_dim, queries.low, queries.high, share, out, c.out_stride[2]);
}

// PAIRS: products of bfloat16 pairs; the arrays of the scratch that are widened otherwise then hold pairs.
template <class E, class T, bool PAIRS>
void forward_item(const ringtile_call &c, int64_t item, int64_t head, T *memory) {
    constexpr int L = Lanes<T>::count, GROUP = TILE_VECTORS * L;
    constexpr bool same = sizeof(E) == sizeof(T);
    ForwardScratch<T> to(c, memory);
    int64_t b = head / c.heads, h = head % c.heads, kv = h / (c.heads / c.kv_heads);
    const int32_t *work = c.work + 5 * (c.work_begin[group_of(c, b, h)] + item - c.item_begin[head]);
    int64_t slot = work[0], row = slot % c.n_rows;
    Span queries = row_span(c, row);
    int from = queries.low / L * L, end = (int)least(c.block, (queries.high + L - 1) / L * L);
    int count = queries.high - queries.low;
    bool few = count <= FEW_QUERIES && !c.dropout_threshold && c.head_dim % L == 0 && c.value_dim % L == 0;
    // Scores are scaled by a positive number: the sign, or a zero, goes into the queries.
    T base = c.scale == 0 ? T(1) : (T)(__builtin_fabs(c.scale) * 1.44269504088896340736);
    T sign = c.scale < 0 ? T(-1) : T(c.scale != 0);
    Rows<E> query_rows = rows_of<E>(c.q, c.q_stride, b, h, queries.first + queries.low);
#if HAS_PAIRS
    uint32_t *query_pairs = (uint32_t *)to.queries, *weight_pairs = (uint32_t *)to.keys;
    bfloat16 *value_pairs = (bfloat16 *)to.values;
    if constexpr (PAIRS) {
        Packing packing(c);
        pair_queries(query_rows, queries.low, queries.high, from, end, c.head_dim, sign, query_pairs);
    }
#endif
    if (!PAIRS) {
        Packing packing(c);
        transpose_in(query_rows, queries.low, queries.high, from, end, c.head_dim, sign, to.queries);
    }
    for (int64_t d = 0; d < c.value_dim; d++)
        for (int lane = from; lane < end; lane++) to.sums[d * MAX_BLOCK + lane] = 0;
    for (int lane = from; lane < end; lane++) to.highest[lane] = -infinity<T>(), to.total[lane] = 0;
    T *few_rows = to.few, *few_sums = few_rows + FEW_QUERIES * c.head_dim;
    T *weights = few_sums + FEW_QUERIES * c.value_dim;
    if (few) {
        Packing packing(c);
        copy_in(query_rows, count, c.head_dim, c.head_dim, nullptr, few_rows);
        for (int64_t i = 0; i < count * c.head_dim; i++) few_rows[i] = sign == 0 ? T(0) : sign * few_rows[i];
        for (int64_t i = 0; i < count * c.value_dim; i++) few_sums[i] = 0;
    }

    Tiles tiles = tiles_of(c.full_row_ptr, c.full_col, c.part_row_ptr, c.part_col, c.part_tile, slot);
    Dropout random = dropout_of(c, b, h);
    int words = (c.block + 31) / 32;
    int64_t col, tile;
    for (int number = 0; number < work[2] && tiles.next(col, tile); number++) {
        if (number < work[1]) continue;
        Span keys = col_span(c, col);
        uint32_t dead[MAX_WORDS];
        bool masked = dropped_keys(c, b, keys, dead), hollow = masked;
        if (tile >= 0) {
            unused_tokens(c, c.cols_any, c.bits_t, tile, keys, queries, dead);
            for (int k = 0; k < keys.high; k++) hollow |= dead[k >> 5] >> (k & 31) & 1;
        }
        Mask mask = {tile >= 0 ? c.bits_t + tile * c.block * words : nullptr, words, hollow ? dead : nullptr, 0};
        Rows<E> key_rows = rows_of<E>(c.k, c.k_stride, b, kv, keys.first);
        Rows<E> value_rows = rows_of<E>(c.v, c.v_stride, b, kv, keys.first);
        const T *key = (const T *)key_rows.x, *value = (const T *)value_rows.x;
        int64_t key_step = key_rows.step, value_step = value_rows.step;
        if (!same && (!PAIRS || few)) {
            Packing packing(c);
            copy_in(key_rows, keys.high, c.head_dim, c.head_dim, nullptr, to.keys);
            key = to.keys, key_step = c.head_dim;
        }
        if ((!PAIRS || few) && (!same || hollow)) {
            Packing packing(c);
            copy_in(value_rows, keys.high, c.value_dim, c.value_dim, hollow ? dead : nullptr, to.values);
            value = to.values, value_step = c.value_dim;
        }
        if (few) {
            bool bits = masked || tile >= 0;
            few_scores(few_rows, count, key, key_step, keys.high, c.head_dim, weights);
            for (int r = 0; bits && r < count; r++) {
                int lane = queries.low + r;
                for (int k = 0; k < keys.high; k++) {
                    bool kept = !mask.bits || (mask.bits[k * words + (lane >> 5)] >> (lane & 31) & 1);
                    if (!kept || mask.drops(k)) weights[r * MAX_BLOCK + k] = -infinity<T>();
                }
            }
            few_soften(weights, count, keys.high, base, bits, to.highest + queries.low, to.total + queries.low,
                       few_sums, c.value_dim);
            for (int64_t d = 0; d < c.value_dim; d += GROUP)
                matmul<T, true>((int)least(TILE_VECTORS, (c.value_dim - d) / L), weights, MAX_BLOCK, value + d,
                                value_step, few_sums + d, c.value_dim, count, keys.high, true);
            continue;
        }
#if HAS_PAIRS
        if constexpr (PAIRS) {
            Packing packing(c);
            pair_rows(value_rows, keys.high, c.value_dim, hollow ? dead : nullptr, value_pairs);
        }
#endif
        uint32_t keep[MAX_BLOCK][MAX_WORDS];
        if (c.dropout_threshold) dropout_bits<false>(random, c, queries, keys, keep);
        for (int lane = from; lane < end; lane += GROUP) {
            int vectors = (int)least(TILE_VECTORS, (end - lane) / L);
            Reach reach = reach_of(mask.bits, words, mask.dead, (int)most(lane, queries.low),
                                   (int)least(lane + GROUP, queries.high), 0, keys.high);
            if (reach.first >= reach.last) continue;
            if (PAIRS) reach.first &= ~1;
            int near = reach.last - reach.first;
            mask.first = reach.first;
#if HAS_PAIRS
            if constexpr (PAIRS) {
                pair_matmul<true>(vectors, key_rows.x + reach.first * key_step, key_step,
                                  query_pairs + (lane - from) * (c.head_dim / 2), GROUP, to.scores, GROUP, near,
                                  c.head_dim / 2, false);
            }
#endif
            if (!PAIRS)
                matmul<T, true>(vectors, key + reach.first * key_step, key_step,
                                to.queries + (lane - from) * c.head_dim, GROUP, to.scores, GROUP, near, c.head_dim,
                                false);
            soften_group<T>(vectors, to.scores, near, lane, base, mask.bits || mask.dead ? &mask : nullptr, to.highest,
                            to.total, to.sums, c.value_dim);
            if (c.dropout_threshold) {
                for (int k = 0; k < near; k++)
                    for (int n = 0; n < vectors; n++) {
                        T *at = to.scores + k * GROUP + n * L;
                        const int32_t *kept = (int32_t *)keep[reach.first + k];
                        store(at, lanes_of<T>(kept, lane + n * L) ? load(at) : Vec<T>{});
                    }
            }
#if HAS_PAIRS
            if constexpr (PAIRS) {
                pair_weights(to.scores, GROUP, near, vectors, weight_pairs);
                pair_matmul<false>(vectors, value_pairs + reach.first * c.value_dim, 2 * c.value_dim, weight_pairs,
                                   GROUP, to.sums + lane, MAX_BLOCK, c.value_dim, (near + 1) / 2, true);
            }
#endif
            if (!PAIRS)
                matmul<T, false>(vectors, value + reach.first * value_step, value_step, to.scores, GROUP,
                                 to.sums + lane, MAX_BLOCK, c.value_dim, near, true);
        }
    }
    for (int r = 0; few && r < count; r++)
        for (int64_t d = 0; d < c.value_dim; d++)
            to.sums[d * MAX_BLOCK + queries.low + r] = few_sums[r * c.value_dim + d];
    if (work[3] < 0) {
        write_row<E, T>(c, b, h, queries, to.sums, to.highest, to.total);
        return;
    }
    T *piece = (T *)c.scratch + (head * c.n_splits + work[3]) * (c.value_dim + 2) * MAX_BLOCK;
    __builtin_memcpy(piece, to.sums, c.value_dim * MAX_BLOCK * sizeof(T));
    __builtin_memcpy(piece + c.value_dim * MAX_BLOCK, to.highest, MAX_BLOCK * sizeof(T));
    __builtin_memcpy(piece + (c.value_dim + 1) * MAX_BLOCK, to.total, MAX_BLOCK * sizeof(T));
}

// Merge the pieces of one row, in their order. `item` is the work item of the row's first piece.
template <class E, class T> void combine_item(const ringtile_call &c, int64_t item, int64_t head, T *memory) {
    ForwardScratch<T> to(c, memory);
    int64_t b = head / c.heads, h = head % c.heads;
    const int32_t *work = c.work + 5 * (c.work_begin[group_of(c, b, h)] + item - c.item_begin[head]);
    if (work[3] < 0 || work[1] != 0) return;
    int32_t slot = work[0], pieces = work[4];
    Span queries = row_span(c, slot % c.n_rows);
    int64_t size = (c.value_dim + 2) * MAX_BLOCK;
    const T *first = (const T *)c.scratch + (head * c.n_splits + work[3]) * size;
    for (int lane = queries.low; lane < queries.high; lane++) {
        T top = -infinity<T>();
        for (int p = 0; p < pieces; p++) {
            T m = first[p * size + c.value_dim * MAX_BLOCK + lane];
            top = m > top ? m : top;
        }
        T safe = top == -infinity<T>() ? T(0) : top, total = 0;
        for (int64_t d = 0; d < c.value_dim; d++) to.sums[d * MAX_BLOCK + lane] = 0;
        for (int p = 0; p < pieces; p++) {
            const T *piece = first + p * size;
            T m = piece[c.value_dim * MAX_BLOCK + lane];
            T share = m == -infinity<T>() ? T(0) : exp2<T>(splat<T>(m - safe))[0];
            total += piece[(c.value_dim + 1) * MAX_BLOCK + lane] * share;
            for (int64_t d = 0; d < c.value_dim; d++)
                to.sums[d * MAX_BLOCK + lane] += piece[d * MAX_BLOCK + lane] * share;
        }
        to.highest[lane] = top;
        to.total[lane] = total;
    }
    write_row<E, T>(c, b, h, queries, to.sums, to.highest, to.total);
}

}  // namespace ISA
