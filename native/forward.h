// The forward pass. A row tile's queries are in the lanes of vectors, so scores are [key][query]: the softmax runs along
// rows of vectors, and keys and values need no packing.
#pragma once
#include "bf16.h"
#include "decode.h"
#include "dropout.h"
#include "transform.h"

namespace ISA {

// A work item: the tiles [first, last) in the list of one row tile and head.
struct RowItem {
    Head head;
    Side queries;
    int64_t slot, first, last, split, splits;

    INLINE RowItem(const ringtile_call &c, int64_t item, int64_t number) : head(c, number) {
        const int32_t *work = c.forward.work + 5 * (c.forward.work_begin[head.group] + item - c.forward.item_begin[number]);
        slot = work[0], first = work[1], last = work[2], split = work[3], splits = work[4];
        queries = row_tokens(c, slot % c.index.n_rows);
    }
};

template <class P> struct ForwardScratch {
    using T = typename P::Number;
    T *softmax, *scores, *products;

    static int64_t size(const ringtile_call &c) {
        int64_t decode = Plain<typename P::Element, T>::size(c) + DECODE_QUERIES * (c.head_dim + c.value_dim + MAX_BLOCK);
        return Softmax<T>::room(c) + GROUP<T> * MAX_BLOCK + max(P::size(c), decode);
    }

    ForwardScratch(const ringtile_call &c, T *x) {
        softmax = x;
        scores = softmax + Softmax<T>::room(c);
        products = scores + GROUP<T> * MAX_BLOCK;
    }
};

// The output of a group of lanes: before it is written, memory has to be read.
template <class P> INLINE Ahead out_ahead(const ringtile_call &c, const RowItem &row, int lane) {
    using E = typename P::Element;
    const int first = (int)max(0, lane - row.queries.low), end = (int)min(lane + P::LANES, row.queries.high);
    const Rows<E> rows = rows_of<E>(c.out, c.out_stride, row.head.b, row.head.h, row.queries);
    return ahead_of(rows, first, end - row.queries.low - first, c.value_dim);
}

// The tiles of a row item, by the products of a policy.
template <class P> void attend_row(const ringtile_call &c, const RowItem &row, ForwardScratch<P> &to) {
    using T = typename P::Number;
    constexpr int L = Lanes<T>::count;
    const Side queries = row.queries;
    const int from = queries.low / P::LANE_STEP * P::LANE_STEP, end = (queries.high + L - 1) / L * L;
    const T base = base_of<T>(c);
    P products(c, to.products);
    products.pack_queries(row.head, queries, from, end, sign_of<T>(c));
    Softmax<T> softmax(c, to.softmax);
    softmax.clear(from, end);
    Dropout random = dropout_of(c, row.head);
    TileCursor tiles = row_tiles(c, row.slot);
    tiles.skip(row.first);
    int64_t col, tile;
    for (int64_t number = row.first; number < row.last && tiles.next(col, tile); number++) {
        Side keys = col_tokens(c, col);
        uint32_t unused[MAX_WORDS], keep[MAX_BLOCK][MAX_WORDS];
        Mask mask = mask_of(c, row.head.b, queries, keys, tile, unused);
        if (mask.keeps_nothing(keys)) continue;
        products.load_tile(row.head, keys, mask.unused);
        if (c.options.dropout_threshold) dropout_bits<false>(random, queries, keys, keep);
        for (int lane = from; lane < end; lane += P::LANES) {
            int vectors = (int)min(P::LANES / L, (end - lane) / L);
            Reach reach = products.reach(mask, queries, keys, lane);
            if (reach.first >= reach.last) continue;
            int first = reach.first / P::KEY_STEP * P::KEY_STEP, count = reach.last - first;
            products.scores(vectors, lane - from, first, count, to.scores);
            if (transforms(c))
                transform_scores<T>(c,
                                    {row.head.b, row.head.h, false, queries.first + lane, keys.first + first,
                                     keys.position + first - queries.position - lane},
                                    to.scores, nullptr, P::LANES, vectors, count);
            products.weigh(vectors, to.scores, first, count, lane, base, mask,
                           c.options.dropout_threshold ? keep : nullptr, softmax);
            const bool last = row.split < 0 && number + 1 == row.last;
            products.add_values(vectors, first, count, to.scores, softmax.sums + lane,
                                last ? out_ahead<P>(c, row, lane) : Ahead{});
        }
    }
}

// The same for a few queries.
template <class P> void decode_row(const ringtile_call &c, const RowItem &row, ForwardScratch<P> &to) {
    using E = typename P::Element;
    using T = typename P::Number;
    constexpr int L = Lanes<T>::count;
    const int low = row.queries.low, n_queries = row.queries.high - low;
    Plain<E, T> products(c, to.products);
    T *queries = to.products + Plain<E, T>::size(c), *sums = queries + DECODE_QUERIES * c.head_dim;
    T *weights = sums + DECODE_QUERIES * c.value_dim, sign = sign_of<T>(c);
    {
        Packing packing(c);
        copy_in(query_rows<E>(c, row.head, row.queries), n_queries, c.head_dim, c.head_dim, nullptr, queries);
        for (int64_t i = 0; i < n_queries * c.head_dim; i++) queries[i] = sign == 0 ? T(0) : sign * queries[i];
    }
    Softmax<T> softmax(c, to.softmax);
    softmax.clear(low, low + n_queries);
    for (int64_t i = 0; i < n_queries * c.value_dim; i++) sums[i] = 0;
    TileCursor tiles = row_tiles(c, row.slot);
    tiles.skip(row.first);
    int64_t col, tile;
    for (int64_t number = row.first; number < row.last && tiles.next(col, tile); number++) {
        Side keys = col_tokens(c, col);
        uint32_t unused[MAX_WORDS];
        Mask mask = mask_of(c, row.head.b, row.queries, keys, tile, unused);
        if (mask.keeps_nothing(keys)) continue;
        products.load_tile(row.head, keys, mask.unused);
        decode_scores({queries, c.head_dim}, n_queries, products.keys, keys.high, c.head_dim, weights);
        if (transforms(c))
            transform_scores<T>(c,
                                {row.head.b, row.head.h, true, keys.first, row.queries.first + low,
                                 row.queries.position + low - keys.position},
                                weights, nullptr, MAX_BLOCK, (keys.high + L - 1) / L, n_queries);
        for (int r = 0; mask.partial() && r < n_queries; r++) {
            int lane = low + r;
            for (int k = 0; k < keys.high; k++) {
                bool kept = !mask.bits || (mask.bits[k * mask.words + (lane >> 5)] >> (lane & 31) & 1);
                if (!kept || mask.drops(k)) weights[r * MAX_BLOCK + k] = -infinity<T>();
            }
        }
        decode_softmax_step(weights, n_queries, keys.high, base_of<T>(c), mask.partial() || mask.lows,
                            softmax.highest + low, softmax.total + low, sums, c.value_dim);
        for (int64_t d = 0; d < c.value_dim; d += GROUP<T>)
            matmul<T, true>((int)min(NR, (c.value_dim - d) / L), weights, MAX_BLOCK, products.values.x + d,
                            products.values.step, sums + d, c.value_dim, n_queries, keys.high, true);
    }
    for (int r = 0; r < n_queries; r++)
        for (int64_t d = 0; d < c.value_dim; d++) softmax.sums[d * MAX_BLOCK + low + r] = sums[r * c.value_dim + d];
}

// Write the output and lse of a row tile.
template <class E, class T> void write_row(const ringtile_call &c, const RowItem &row, const Softmax<T> &softmax) {
    const Side queries = row.queries;
    const Head &head = row.head;
    E *out = (E *)c.out + head.b * c.out_stride[0] + head.h * c.out_stride[1] + queries.first * c.out_stride[2];
    T *lse = (T *)c.lse + head.number * c.n_queries + queries.first;
    T kept = c.options.dropout_threshold ? T(65536.0 / (65536 - c.options.dropout_threshold)) : T(1);
    T share[MAX_BLOCK] = {};
    const T scale = (T)size_of_scale(c);
    for (int lane = queries.low; lane < queries.high; lane++) {
        // No key is kept, or all scores are -inf.
        lse[lane] = softmax.highest[lane] * scale + exact_log(softmax.total[lane]);
        share[lane] = lse[lane] == -infinity<T>() ? T(0) : kept / softmax.total[lane];
    }
    transpose_out<E, T>(softmax.sums, c.value_dim, queries.low, queries.high, share, out, c.out_stride[2]);
}

template <class P> void forward_item(const ringtile_call &c, int64_t item, int64_t head, typename P::Number *memory) {
    using T = typename P::Number;
    ForwardScratch<P> to(c, memory);
    RowItem row(c, item, head);
    if (decodes<T>(c, row.queries)) decode_row<P>(c, row, to);
    else attend_row<P>(c, row, to);
    int64_t size = Softmax<T>::size(c);
    if (row.split < 0) write_row<typename P::Element, T>(c, row, Softmax<T>(c, to.softmax));
    else
        __builtin_memcpy((T *)c.work.scratch + (head * c.forward.n_splits + row.split) * size, to.softmax,
                         size * sizeof(T));
}

// Merge the splits of a row, in their order. `item` does so if it is the row's first.
template <class P> void combine_item(const ringtile_call &c, int64_t item, int64_t head, typename P::Number *memory) {
    using T = typename P::Number;
    RowItem row(c, item, head);
    if (row.split < 0 || row.first != 0) return;
    int64_t size = Softmax<T>::size(c);
    const T base = base_of<T>(c);
    Softmax<T> merged(c, memory), begin(c, (T *)c.work.scratch + (head * c.forward.n_splits + row.split) * size);
    for (int lane = row.queries.low; lane < row.queries.high; lane++) {
        T top = -infinity<T>();
        for (int64_t split = 0; split < row.splits; split++) {
            T m = begin.highest[split * size + lane];
            top = m > top ? m : top;
        }
        T safe = top == -infinity<T>() ? T(0) : top, total = 0;
        for (int64_t d = 0; d < c.value_dim; d++) merged.sums[d * MAX_BLOCK + lane] = 0;
        for (int64_t split = 0; split < row.splits; split++) {
            T m = begin.highest[split * size + lane];
            T share = m == -infinity<T>() ? T(0) : exp2<T>(splat<T>((m - safe) * base))[0];
            total += begin.total[split * size + lane] * share;
            for (int64_t d = 0; d < c.value_dim; d++)
                merged.sums[d * MAX_BLOCK + lane] += begin.sums[split * size + d * MAX_BLOCK + lane] * share;
        }
        merged.highest[lane] = top;
        merged.total[lane] = total;
    }
    write_row<typename P::Element, T>(c, row, merged);
}

}  // namespace ISA
