// The gradients of one tile. The matrix products of the backward pass are a policy too, a template parameter of backward.h.
#pragma once
#include "bf16.h"
#include "decode.h"
#include "dropout.h"
#include "transform.h"

namespace ISA {

// The sums of a row's queries or of a column's keys, and of a column's keys and values, in numbers.
INLINE int64_t key_numbers(const ringtile_call &c) { return round16(c.head_dim) * MAX_BLOCK; }
INLINE int64_t column_numbers(const ringtile_call &c) { return key_numbers(c) + round16(c.value_dim) * MAX_BLOCK; }

// By query of a head: what delta_item writes.
template <class T> INLINE const T *delta_of(const ringtile_call &c, const Head &head) {
    return (const T *)c.backward.delta + 2 * head.number * c.n_queries;
}
template <class T> INLINE const T *lse_of(const ringtile_call &c, const Head &head) {
    return delta_of<T>(c, head) + c.n_queries;
}

template <class T> INLINE void clear(T *sums, int64_t count) {
    for (int64_t i = 0; i < count; i++) sums[i] = 0;
}

// The same for the lanes of existing tokens in rows [d][lane]. No one reads the others.
template <class T> INLINE void clear_lanes(T *sums, int64_t width, Side side) {
    constexpr int L = Lanes<T>::count;
    const int from = side.low / L * L, end = (side.high + L - 1) / L * L;
    for (int64_t d = 0; d < width; d++) clear(sums + d * MAX_BLOCK + from, end - from);
}

// A tile of the backward pass. KEYS: keys are in the lanes and queries in the rows. Otherwise the other way around.
template <class T, bool KEYS> struct GradientTile {
    const Head &head;
    Side queries, keys;
    const T *lse, *delta;  // of the queries, by lane
    const int32_t *bits;    // a row of `words` per token that is not in the lanes, null for a full tile
    int words;
    bool masked_keys, any_keys, any_queries, lone;  // lone: a query has no score above -inf, here and elsewhere
    uint32_t unused_keys[MAX_WORDS], unused_queries[MAX_WORDS], keep[MAX_BLOCK][MAX_WORDS];

    INLINE GradientTile(const ringtile_call &c, const Head &at, const Dropout &random, Side query_side, Side key_side,
                        int64_t tile, const T *row_lse, const T *row_delta)
        : head(at), queries(query_side), keys(key_side), lse(row_lse), delta(row_delta), words(words_of(c)) {
        bits = tile >= 0 ? (KEYS ? c.index.bits : c.index.bits_t) + tile * c.block * words : nullptr;
        masked_keys = ISA::masked_keys(c, head.b, keys, unused_keys);
        for (int w = 0; w < MAX_WORDS; w++) unused_queries[w] = 0;
        if (tile >= 0) {
            add_unused(c, c.index.cols_any, c.index.bits_t, tile, keys, queries, unused_keys);
            add_unused(c, c.index.rows_any, c.index.bits, tile, queries, keys, unused_queries);
        }
        lone = false;
        for (int q = queries.low; q < queries.high; q++) {
            unused_queries[q >> 5] |= (uint32_t)(lse[q] == infinity<T>()) << (q & 31);
            lone |= lse[q] == infinity<T>();
        }
        any_keys = any_of(unused_keys, keys), any_queries = any_of(unused_queries, queries);
        if (c.options.dropout_threshold) dropout_bits<KEYS>(random, queries, keys, keep);
    }

    INLINE const Side &others() const { return KEYS ? queries : keys; }

    // The place of scores from a lane of either side on.
    INLINE Corner corner(int first, int lane) const {
        const Side &lanes = KEYS ? keys : queries, &rows = others();
        return {head.b,           head.h,           KEYS, lanes.first + lane,
                rows.first + first, rows.position + first - lanes.position - lane};
    }

    // Softcap, ALiBi and the bias of scores [count][step] from lane `first` of the other side on, and their derivatives.
    __attribute__((noinline)) void transform(const ringtile_call &c, T *scores, T *factors, int step, int vectors,
                                             int count, int first, int lane) const {
        transform_scores<T>(c, corner(first, lane), scores, factors, step, vectors, count);
    }

    // The tokens of the other side that the lanes [low, high) keep.
    INLINE Reach reach(int low, int high) const {
        const Side &side = KEYS ? keys : queries;
        const uint32_t *unused = KEYS ? any_queries ? unused_queries : nullptr : any_keys ? unused_keys : nullptr;
        return reach_of(bits, words, unused, (int)max(low, side.low), (int)min(high, side.high), others().low,
                        others().high);
    }
};

// Scores and products of out_grad and values, both [count][GROUP], become dropped weights and gradients of scores. Rows
// start at lane `first` of their side. Unless null, factors multiply gradients too.
template <class T, int N, bool KEYS>
void score_gradients(const ringtile_call &c, T *scores, T *grads, const T *factors, int first, int count, int lane,
                     const GradientTile<T, KEYS> &tile) {
    constexpr int L = Lanes<T>::count;
    const T scale = (T)c.options.scale;
    const bool dropout = c.options.dropout_threshold;
    const T share = dropout ? T(65536.0 / (65536 - c.options.dropout_threshold)) : T(1);
    const T *lse = tile.lse, *delta = tile.delta;
    const int32_t *bits = tile.bits;
    const uint32_t *masked = tile.masked_keys ? tile.unused_keys : nullptr;
    const bool lows = c.options.added;  // where a weight is to be exactly 0
    for (int i = 0; i < count; i++) {
        int other = first + i;
        bool dropped = !KEYS && masked && bit(masked, other);
        for (int n = 0; n < N; n++) {
            int at = lane + n * L;
            opaque(factors);
            Vec<T> s = load(scores + i * GROUP<T> + n * L), g = load(grads + i * GROUP<T> + n * L);
            Vec<T> high = KEYS ? splat<T>(lse[other]) : load(lse + at),
                mean = KEYS ? splat<T>(delta[other]) : load(delta + at);
            Vec<T> p = exp2<T>(exponent_of<T>(s, scale, high)), q = p;
            if (dropout) {
                Ints<T> keep = lanes_of<T>((const int32_t *)tile.keep[other], at);
                q = keep ? p * share : Vec<T>{};
                g = keep ? g * share : Vec<T>{};
            }
            g = p * (g - mean) * scale;
            if (factors) g *= load(factors + i * GROUP<T> + n * L);
            if (bits || masked || lows || tile.lone) {
                Ints<T> kept = bits ? lanes_of<T>(bits + other * tile.words, at) : ~Ints<T>{};
                if (lows) kept &= s != -infinity<T>();
                if (tile.lone) kept &= high != infinity<T>();
                if (KEYS && masked) kept &= ~lanes_of<T>((const int32_t *)masked, at);
                if (dropped) kept = Ints<T>{};
                q = kept ? q : Vec<T>{};
                g = kept ? g : Vec<T>{};
            }
            store(scores + i * GROUP<T> + n * L, q);
            store(grads + i * GROUP<T> + n * L, g);
        }
    }
}

// The same for so many vectors, after softcap, ALiBi or a bias. Not inline, as in transform.h.
template <class T, bool KEYS>
__attribute__((noinline)) void group_weights(const ringtile_call &c, T *scores, T *grads, T *factors, int first,
                                             int count, int vectors, int lane, const GradientTile<T, KEYS> &tile) {
    if (transforms(c)) tile.transform(c, scores, factors, GROUP<T>, vectors, count, first, lane);
    if (!transforms(c) || c.options.added) factors = nullptr;
    with_constant<NR>(vectors, [&](auto n) INLINE_LAMBDA {
        score_gradients<T, decltype(n)::value>(c, scores, grads, factors, first, count, lane, tile);
    });
    if (c.options.added)
        add_bias_grads<T>(c, tile.corner(first, lane), grads, (int)min(GROUP<T>, tile.keys.high - lane), count);
}

// The members of a policy P of the backward pass. A policy without one of them, or with other arguments, does not compile.
//   Element, Number, Unit   as in the forward pass
//   KEY_LANES               whether it wants a column's tiles with the keys in the lanes
//   COLLECTS                whether the gradients of queries take their final form after the last column: collected(...)
//   size(call)              the scratch of a policy, in numbers of type Number
//   pack_column(...)        a column tile, once, and what gradients of queries need if they are summed too
//   clear_column(...)       zero its sums of keys and values, whose form is the policy's own
//   column_tile(...)        add a tile's gradients to them, and to the queries' gradients unless those are null
//   write_column(...)       write the sums to the gradients of keys and values
//   pack_row, row_tile      the same for a row tile, whose sums are [d][lane]
//   query_factor(call)      what is left to multiply gradients of queries by
template <class P, class T = typename P::Number>
constexpr bool is_backward_policy(P *p = nullptr, const Head *head = nullptr, T *x = nullptr,
                                  const GradientTile<T, P::KEY_LANES> *column = nullptr,
                                  const GradientTile<T, false> *row = nullptr) {
    using calls = decltype(p->pack_column(*head, Side{}, true), P::clear_column(p->c, Side{}, x),
                     p->column_tile(*column, x, x, x), P::write_column(p->c, *head, Side{}, (const T *)x),
                     p->pack_row(*head, Side{}), p->row_tile(*row, x));
    using numbers = decltype(P::query_factor(p->c) + P::size(p->c));
    return sizeof(calls *) && sizeof(numbers) && sizeof(typename P::Element) && sizeof(typename P::Unit) &&
           (P::COLLECTS || true);
}

// Multiply in the accumulation type. The tokens in the lanes are packed once. Those of the other side are read in place,
// or copied for each tile if they are narrower or some of them are unused. PAIRS: the forward pass took its scores from
// dot products of pairs, and weights exp(score - lse) need the same roundings.
template <class E, class T, bool PAIRS = false> struct PlainGradients {
    using Element = E;
    using Number = T;
    using Unit = VectorUnit;
    static constexpr bool KEY_LANES = true, COLLECTS = false;
    static constexpr int L = Lanes<T>::count;

    const ringtile_call &c;
    const int64_t width;  // D in whole vectors: of a row of keys whose product is a row of vectors
    // Operands of D and of Dv numbers: keys and values in the lanes, queries and output gradients in the rows, or the
    // other way around.
    T *lanes_d, *lanes_dv, *copy_d, *copy_dv, *keys, *used_keys, *query_copy, *scores, *grads, *factors;
    Rows<T> others_d, others_dv;
    Rows<E> pairs;  // of the other side
    E *pair_copy;
    T decoded[DECODE_QUERIES * MAX_BLOCK];  // scores of the current tile if it decodes

    static int64_t padded(const ringtile_call &c) { return (c.head_dim + L - 1) / L * L; }
    static int64_t size(const ringtile_call &c) {
        const int64_t pairs = PAIRS ? c.head_dim / 2 : 0;
        return (2 * c.head_dim + 2 * c.value_dim + 3 * padded(c) + 3 * GROUP<T> + pairs) * MAX_BLOCK;
    }

    PlainGradients(const ringtile_call &call, T *x) : c(call), width(padded(call)), others_d(), others_dv(), pairs() {
        T **places[] = {&keys,    &used_keys, &query_copy, &scores,   &grads,
                        &factors, &lanes_d,   &copy_d,     &lanes_dv, &copy_dv};
        int64_t widths[] = {width,    width,      width,      GROUP<T>,    GROUP<T>,
                            GROUP<T>, c.head_dim, c.head_dim, c.value_dim, c.value_dim};
        for (int i = 0; i < 10; i++) {
            *places[i] = x;
            x += widths[i] * MAX_BLOCK;
        }
        pair_copy = (E *)x;
    }

    INLINE void pack_lanes(Rows<E> rows_d, Rows<E> rows_dv, Side side) {
        int from = side.low / L * L, end = (side.high + L - 1) / L * L;
#if HAS_BF16_PAIRS
        if constexpr (PAIRS) interleave_queries(rows_d, side.low, side.high, from, end, c.head_dim, 1, (uint32_t *)lanes_d);
        else
#endif
            transpose_in(rows_d, side.low, side.high, from, end, c.head_dim, T(1), lanes_d);
        transpose_in(rows_dv, side.low, side.high, from, end, c.value_dim, T(1), lanes_dv);
    }

    INLINE void load_others(Rows<E> rows_d, Rows<E> rows_dv, Side side, const uint32_t *unused) {
        constexpr bool same = sizeof(E) == sizeof(T);
        others_d = {(const T *)rows_d.x, rows_d.step};
        others_dv = {(const T *)rows_dv.x, rows_dv.step};
        if (same && !unused) return;
        Packing packing(c);
        uint32_t from_low[MAX_WORDS] = {};
        for (int i = side.low; unused && i < side.high; i++)
            from_low[(i - side.low) >> 5] |= bit(unused, i) << ((i - side.low) & 31);
        copy_in(rows_d, side.high - side.low, c.head_dim, c.head_dim, from_low, copy_d);
        copy_in(rows_dv, side.high - side.low, c.value_dim, c.value_dim, from_low, copy_dv);
        others_d = {copy_d, c.head_dim};
        others_dv = {copy_dv, c.value_dim};
        pairs = rows_d;
        if (!PAIRS || !unused) return;
        for (int i = 0; i < side.high - side.low; i++) {
            E *to = pair_copy + i * c.head_dim;
            if (bit(from_low, i)) __builtin_memset(to, 0, c.head_dim * sizeof(E));
            else __builtin_memcpy(to, rows_d.row(i), c.head_dim * sizeof(E));
        }
        pairs = {pair_copy, c.head_dim};
    }

    // Scores of `count` tokens of the other side from `skipped` on, for a group of lanes.
    INLINE void multiply_scores(int vectors, int offset, int skipped, int count) {
#if HAS_BF16_PAIRS
        if constexpr (PAIRS)
            return matmul<E, true>(vectors, pairs.row(skipped), pairs.step, (uint32_t *)lanes_d + offset * (c.head_dim / 2),
                                   GROUP<T>, scores, GROUP<T>, count, c.head_dim / 2, false);
#endif
        matmul<T, true>(vectors, others_d.row(skipped), others_d.step, lanes_d + offset * c.head_dim, GROUP<T>, scores,
                        GROUP<T>, count, c.head_dim, false);
    }

    // The scores of a few queries, from [query][key] to the layout of other tiles.
    template <bool KEYS>
    INLINE void place_decoded(const GradientTile<T, KEYS> &tile, int vectors, int lane, int skipped, int count) {
        const int n_queries = tile.queries.high - tile.queries.low;
        for (int i = 0; i < count; i++)
            for (int l = 0; l < vectors * L; l++) {
                int query = KEYS ? skipped + i : lane + l - tile.queries.low, key = KEYS ? lane + l : skipped + i;
                scores[i * GROUP<T> + l] = query >= 0 && query < n_queries ? decoded[query * MAX_BLOCK + key] : T(0);
            }
    }

    // Weights and gradients of scores for the group of lanes at `lane`, `offset` lanes after the first packed one, and the
    // `count` tokens of the other side that start `skipped` rows after its first.
    template <bool KEYS>
    INLINE void group_gradients(const GradientTile<T, KEYS> &tile, int vectors, int lane, int offset, int skipped,
                                int count) {
        if (decodes<T>(c, tile.queries)) place_decoded(tile, vectors, lane, skipped, count);
        else multiply_scores(vectors, offset, skipped, count);
        matmul<T, true>(vectors, others_dv.row(skipped), others_dv.step, lanes_dv + offset * c.value_dim, GROUP<T>,
                        grads, GROUP<T>, count, c.value_dim, false);
        group_weights(c, scores, grads, factors, tile.others().low + skipped, count, vectors, lane, tile);
    }

    // Keys of a key head, and `with_rows` if gradients of queries are summed too.
    INLINE void pack_column(const Head &head, Side side, bool with_rows) {
        Packing packing(c);
        pack_lanes(key_rows<E>(c, head, side), value_rows<E>(c, head, side), side);
        uint32_t unused[MAX_WORDS];
        bool masked = masked_keys(c, head.b, side, unused);
        if (with_rows || sizeof(E) != sizeof(T))
            copy_in(key_rows<E>(c, head, side), side.high, c.head_dim, width, masked ? unused : nullptr, keys);
    }

    // What is left to multiply gradients of queries by.
    INLINE static T query_factor(const ringtile_call &) { return 1; }

    INLINE static void clear_column(const ringtile_call &c, Side keys, T *sums) {
        clear_lanes(sums, c.head_dim, keys);
        clear_lanes(sums + key_numbers(c), c.value_dim, keys);
    }

    // Write sums [d][key] of keys, then of values, to the gradients of a column.
    static void write_column(const ringtile_call &c, const Head &head, Side keys, const T *sums) {
        int64_t at = (head.b * c.kv_heads + head.kv) * c.n_keys + keys.first;
        T ones[MAX_BLOCK];
        for (T &share : ones) share = 1;
        transpose_out<E, T>(sums, c.head_dim, 0, keys.high, ones, (E *)c.backward.k_grad + at * c.head_dim, c.head_dim);
        transpose_out<E, T>(sums + key_numbers(c), c.value_dim, 0, keys.high, ones,
                            (E *)c.backward.v_grad + at * c.value_dim, c.value_dim);
    }

    // Add to sums of keys and values, and to rows of the queries' gradients unless they are null.
    INLINE void column_tile(const GradientTile<T, true> &tile, T *key_sums, T *value_sums, T *query_grad) {
        const Side queries = tile.queries;
        const int low = queries.low, count = queries.high - low, high = tile.keys.high;
        const bool direct = width == c.head_dim;
        load_others(query_rows<E>(c, tile.head, queries), out_grad_rows<E>(c, tile.head, queries), queries,
                    tile.any_queries ? tile.unused_queries : nullptr);
        if (query_grad && tile.any_keys) {
            Packing packing(c);
            copy_in(key_rows<E>(c, tile.head, tile.keys), high, c.head_dim, width, tile.unused_keys, used_keys);
        }
        if (decodes<T>(c, queries)) {
            Rows<E> in_place = key_rows<E>(c, tile.head, tile.keys);
            bool same = sizeof(E) == sizeof(T);
            decode_scores(others_d, count, same ? Rows<T>{(const T *)in_place.x, in_place.step} : Rows<T>{keys, width},
                          high, c.head_dim, decoded);
        }
        const T *own_keys = tile.any_keys ? used_keys : keys;
        T *rows = direct ? query_grad : query_copy;
        if (query_grad && !direct) copy_in(Rows<T>{query_grad, c.head_dim}, count, c.head_dim, width, nullptr, rows);
        for (int lane = 0; lane < high; lane += GROUP<T>) {
            int vectors = (int)min(NR, (high - lane + L - 1) / L);
            Reach reach = tile.reach(lane, lane + GROUP<T>);
            if (reach.first >= reach.last) continue;
            int skipped = reach.first - low, near = reach.last - reach.first;
            group_gradients(tile, vectors, lane, lane, skipped, near);
            matmul<T, false>(vectors, others_dv.row(skipped), others_dv.step, scores, GROUP<T>, value_sums + lane,
                             MAX_BLOCK, c.value_dim, near, true);
            matmul<T, false>(vectors, others_d.row(skipped), others_d.step, grads, GROUP<T>, key_sums + lane, MAX_BLOCK,
                             c.head_dim, near, true);
            for (int64_t d = 0; query_grad && d < width; d += GROUP<T>)
                matmul<T, true>((int)min(NR, (width - d) / L), grads, GROUP<T>, own_keys + lane * width + d,
                                width, rows + skipped * width + d, width, near, min(GROUP<T>, high - lane), true);
        }
        for (int i = 0; query_grad && !direct && i < count; i++)
            __builtin_memcpy(query_grad + i * c.head_dim, rows + i * width, c.head_dim * sizeof(T));
    }

    INLINE void pack_row(const Head &head, Side side) {
        Packing packing(c);
        pack_lanes(query_rows<E>(c, head, side), out_grad_rows<E>(c, head, side), side);
        if (decodes<T>(c, side))
            copy_in(query_rows<E>(c, head, side), side.high - side.low, c.head_dim, width, nullptr, query_copy);
    }

    INLINE void row_tile(const GradientTile<T, false> &tile, T *sums) {
        const Side keys = tile.keys;
        const int from = tile.queries.low / L * L, end = (tile.queries.high + L - 1) / L * L;
        load_others(key_rows<E>(c, tile.head, keys), value_rows<E>(c, tile.head, keys), keys,
                    tile.any_keys ? tile.unused_keys : nullptr);
        if (decodes<T>(c, tile.queries))
            decode_scores({query_copy, width}, tile.queries.high - tile.queries.low, others_d, keys.high, c.head_dim,
                          decoded);
        for (int lane = from; lane < end; lane += GROUP<T>) {
            int vectors = (int)min(NR, (end - lane) / L);
            Reach reach = tile.reach(lane, lane + GROUP<T>);
            // Start at a group of keys and add one group at a time, as columns do, to get the same bits.
            int skipped = reach.first / GROUP<T> * GROUP<T>, near = reach.last - skipped;
            if (near <= 0) continue;
            group_gradients(tile, vectors, lane, lane - from, skipped, near);
            for (int64_t k = 0; k < near; k += GROUP<T>)
                matmul<T, false>(vectors, others_d.row(skipped + k), others_d.step, grads + k * GROUP<T>, GROUP<T>,
                                 sums + lane, MAX_BLOCK, c.head_dim, min(GROUP<T>, near - k), true);
        }
    }
};

}  // namespace ISA
