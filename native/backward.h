// The backward pass, from the output and lse of the full softmax. TileCursor are computed in two forms: by columns (gradients
// of keys and values, and of queries if a thread has a whole head) and by rows (gradients of queries). Both add the same
// products in the same order, so they agree to the last bit. If the layout splits a list, each split is summed from zero
// and the sums are added in their order, no matter which threads computed them.
#pragma once
#include "gradients.h"

namespace ISA {

template <class P> struct BackwardScratch {
    using T = typename P::Number;
    T *sums, *totals, *products;  // sums of keys, then values, or of queries

    static int64_t size(const ringtile_call &c) { return 2 * column_numbers(c) + P::size(c); }

    BackwardScratch(const ringtile_call &c, T *x)
        : sums(x), totals(x + column_numbers(c)), products(totals + column_numbers(c)) {}
};

// For each query of a head: rowsum(out_grad * out) - lse_grad, and the lse, +inf for a query without a score above -inf.
template <class E, class T> void delta_item(const ringtile_call &c, int64_t number) {
    constexpr int ROWS = 8;
    const Head head(c, number);
    const Side all = {};
    Rows<E> out = rows_of<E>(c.out, c.out_stride, head.b, head.h, all), grad = out_grad_rows<E>(c, head, all);
    const T *lse = (const T *)c.lse + number * c.n_queries;
    const T *lse_grad = c.backward.lse_grad ? (const T *)c.backward.lse_grad + number * c.n_queries : nullptr;
    T *delta = (T *)delta_of<T>(c, head), *own_lse = (T *)lse_of<T>(c, head);
    // Products are added as matmul adds them: the gradient of a row's only score is then 0, to the last bit. Some rows at a
    // time, because each addition waits for the one before.
    for (int64_t first = 0; first < c.n_queries; first += ROWS) {
        const int64_t last = c.n_queries - 1;
        T sums[ROWS] = {};
        for (int64_t d = 0; d < c.value_dim; d++)
            for (int r = 0; r < ROWS; r++) {
                const int64_t i = min(first + r, last);
                sums[r] = fused((T)widen(out.row(i)[d]), (T)widen(grad.row(i)[d]), sums[r]);
            }
        for (int64_t i = first; i < min(first + ROWS, c.n_queries); i++) {
            const bool empty = lse[i] == -infinity<T>();
            delta[i] = empty ? T(0) : lse_grad ? sums[i - first] - lse_grad[i] : sums[i - first];
            own_lse[i] = empty ? infinity<T>() : lse[i];
        }
    }
}

// The first tile of a split of a list.
INLINE int64_t split_begin(int64_t length, int64_t splits, int64_t split) { return length * split / splits; }

// Add the sums of a split to the total of the splits before it.
template <class T> INLINE void add_up(T *total, const T *sums, int64_t count, bool first) {
    for (int64_t i = 0; i < count; i++) total[i] = first ? sums[i] : total[i] + sums[i];
}

// The memory in which a thread that goes through the columns sums the gradients of a row's queries. Splits after the
// first have a buffer of their own, which is added to the total after their last tile.
template <class T> struct RowSums {
    T *total, *at;
    bool ends;
};

template <class T>
INLINE RowSums<T> row_sums(const ringtile_call &c, T *total, const Head &head, int64_t slot, int64_t col, int64_t count) {
    int64_t splits = c.backward.row_splits[slot];
    if (splits == 1) return {total, total, false};
    TileCursor tiles = row_tiles(c, slot);
    int64_t length = tiles.length(), number = tiles.before(col), split = ((number + 1) * splits - 1) / length;
    if (split == 0) return {total, total, false};
    int64_t place = head.number * c.backward.n_row_buffers + c.backward.row_buffer[slot];
    T *buffer = (T *)c.backward.row_buffers + place * MAX_BLOCK * c.head_dim;
    if (number == split_begin(length, splits, split)) clear(buffer, count);
    return {total, buffer, number + 1 == split_begin(length, splits, split + 1)};
}

// The next `count` tiles of a column's list: sums of key and value gradients, and gradients of queries if `with_rows`.
template <class P>
void sum_column(const ringtile_call &c, const Head &head, int64_t col, TileCursor &tiles, int64_t count, P &products,
                typename P::Number *sums, bool with_rows) {
    using T = typename P::Number;
    Dropout random = dropout_of(c, head);
    int64_t row, number;
    while (count-- > 0 && tiles.next(row, number)) {
        Side queries = row_tokens(c, row);
        GradientTile<T, P::KEY_LANES> tile(c, head, random, queries, col_tokens(c, col), number,
                                           lse_of<T>(c, head) + queries.first, delta_of<T>(c, head) + queries.first);
        RowSums<T> own = {};
        int64_t numbers = (queries.high - queries.low) * c.head_dim;
        T *grad = (T *)c.backward.q_sums + (head.number * c.n_queries + queries.first + queries.low) * c.head_dim;
        if (with_rows) own = row_sums<T>(c, grad, head, head.group * c.index.n_rows + row, col, numbers);
        products.column_tile(tile, sums, sums + key_numbers(c), own.at);
        if (own.ends) add_up(own.total, own.at, numbers, false);
    }
}

// The same for a row's list, from statistics that are padded to whole vectors: sums of query gradients.
template <class P>
void sum_row(const ringtile_call &c, const Head &head, Side queries, TileCursor &tiles, int64_t count, P &products,
             typename P::Number *sums) {
    using T = typename P::Number;
    // Lanes without a query get lse = +inf, which makes their weights zero.
    T lse[MAX_BLOCK], delta[MAX_BLOCK];
    for (int lane = 0; lane < MAX_BLOCK; lane++) {
        bool inside = lane >= queries.low && lane < queries.high;
        lse[lane] = inside ? lse_of<T>(c, head)[queries.first + lane] : infinity<T>();
        delta[lane] = inside ? delta_of<T>(c, head)[queries.first + lane] : T(0);
    }
    Dropout random = dropout_of(c, head);
    clear_lanes(sums, c.head_dim, queries);
    int64_t col, number;
    while (count-- > 0 && tiles.next(col, number))
        products.row_tile(GradientTile<T, false>(c, head, random, queries, col_tokens(c, col), number, lse, delta), sums);
}

// Write sums [d][lane] to the gradients of a row's queries, zero for a query that has none.
template <class P, class E>
void write_queries(const ringtile_call &c, const Head &head, Side queries, const typename P::Number *sums, E *grads) {
    using T = typename P::Number;
    E *grad = grads + (head.number * c.n_queries + queries.first) * c.head_dim;
    const T *lse = lse_of<T>(c, head) + queries.first;
    T share[MAX_BLOCK] = {};
    for (int lane = queries.low; lane < queries.high; lane++)
        share[lane] = lse[lane] == infinity<T>() ? T(0) : P::query_factor(c);
    transpose_out<E, T>(sums, c.head_dim, queries.low, queries.high, share, grad, c.head_dim);
}

// The gradients of one column tile of a key head, summed over its query heads in their order: in one chain, or split by
// split if the list of any of them is split.
template <class P>
void column(const ringtile_call &c, int64_t b, int64_t kv, int64_t col, BackwardScratch<P> &to, P &products,
            bool with_rows) {
    int64_t ratio = c.heads / c.kv_heads, size = column_numbers(c), begin = b * c.heads + kv * ratio;
    const Side keys = col_tokens(c, col);
    products.pack_column(Head(c, begin), keys, with_rows);
    P::clear_column(c, keys, to.sums);
    bool cut = false, first = true;
    for (int64_t number = begin; number < begin + ratio; number++)
        cut |= c.backward.col_splits[Head(c, number).group * c.index.n_cols + col] > 1;
    for (int64_t number = begin; number < begin + ratio; number++) {
        const Head head(c, number);
        int64_t slot = head.group * c.index.n_cols + col, splits = c.backward.col_splits[slot];
        TileCursor tiles = col_tiles(c, slot);
        for (int64_t split = 0; split < splits; split++) {
            int64_t from = split_begin(tiles.length(), splits, split);
            if (!first) P::clear_column(c, keys, to.sums);
            sum_column(c, head, col, tiles, split_begin(tiles.length(), splits, split + 1) - from, products, to.sums,
                       with_rows);
            if (!cut) continue;
            add_up(to.totals, to.sums, size, first);
            first = false;
        }
    }
    P::write_column(c, Head(c, begin), keys, cut ? to.totals : to.sums);
}

// All columns of a key head (`item`), with the gradients of its queries: five products per tile instead of seven.
template <class P> void head_item(const ringtile_call &c, int64_t item, typename P::Number *memory) {
    using T = typename P::Number;
    BackwardScratch<P> to(c, memory);
    P products(c, to.products);
    const int64_t heads_a_key = c.heads / c.kv_heads;
    for (int64_t head = 0; c.work.first_col == 0 && head < heads_a_key; head++)
        delta_item<typename P::Element, T>(c, item * heads_a_key + head);
    for (int64_t col = c.work.first_col; col < c.work.last_col; col++)
        column<P>(c, item / c.kv_heads, item % c.kv_heads, col, to, products, true);
    if (c.work.last_col < c.index.n_cols) return;
    if constexpr (P::COLLECTS) {
        for (int64_t at = 0; at < heads_a_key * c.index.n_rows; at++) {
            const Head head(c, item * heads_a_key + at / c.index.n_rows);
            const Side queries = row_tokens(c, at % c.index.n_rows);
            T *grads = (T *)c.backward.q_sums;
            T *grad = grads + (head.number * c.n_queries + queries.first + queries.low) * c.head_dim;
            write_queries<P>(c, head, queries, products.collected(queries, grad), grads);
        }
    } else {
        // A gradient of 0 times a key of -inf is NaN.
        for (int64_t at = item * heads_a_key * c.n_queries; at < (item + 1) * heads_a_key * c.n_queries; at++)
            if (((const T *)c.lse)[at] == -infinity<T>()) clear((T *)c.backward.q_sums + at * c.head_dim, c.head_dim);
    }
}

// A split of a row or column (`item`) that several threads share.
struct SharedSplit {
    int64_t item, head, first, last;
};

INLINE const SharedSplit &shared_split(const ringtile_call &c, int64_t number) {
    return ((const SharedSplit *)c.backward.shared_splits)[number];
}

// True if several threads share a row or column. The shared splits are sorted.
INLINE bool is_shared(const ringtile_call &c, int64_t item) {
    int64_t at = bisect(c.backward.n_shared_splits, [&](int64_t i) { return shared_split(c, i).item < item; });
    return at < c.backward.n_shared_splits && shared_split(c, at).item == item;
}

// The sums of all shared splits of an item, added in order into the first. Null if `number` is another split.
template <class T> T *folded(const ringtile_call &c, int64_t number, int64_t size) {
    int64_t item = shared_split(c, number).item;
    if (number > 0 && shared_split(c, number - 1).item == item) return nullptr;
    T *total = (T *)c.work.scratch + number * size;
    for (int64_t at = number + 1; at < c.backward.n_shared_splits && shared_split(c, at).item == item; at++)
        add_up(total, (const T *)c.work.scratch + at * size, size, false);
    return total;
}

// The first of the query heads of a column item.
INLINE Head column_head(const ringtile_call &c, int64_t item) {
    return Head(c, item / c.index.n_cols * (c.heads / c.kv_heads));
}

template <class P> void column_item(const ringtile_call &c, int64_t number, typename P::Number *memory) {
    const bool is_shared_split = number < c.backward.n_shared_splits;
    int64_t item = is_shared_split ? shared_split(c, number).item : number - c.backward.n_shared_splits;
    int64_t col = item % c.index.n_cols;
    if (!is_shared_split && is_shared(c, item)) return;
    BackwardScratch<P> to(c, memory);
    P products(c, to.products);
    if (!is_shared_split) {
        const Head head = column_head(c, item);
        return column<P>(c, head.b, head.kv, col, to, products, false);
    }
    const SharedSplit &split = shared_split(c, number);
    const Head head(c, split.head);
    products.pack_column(head, col_tokens(c, col), false);
    typename P::Number *sums = (typename P::Number *)c.work.scratch + number * column_numbers(c);
    clear(sums, column_numbers(c));
    TileCursor tiles = col_tiles(c, head.group * c.index.n_cols + col);
    tiles.skip(split.first);
    sum_column(c, head, col, tiles, split.last - split.first, products, sums, false);
}

// Write the sum of a column's shared splits if `number` is the first of them.
template <class P> void fold_column(const ringtile_call &c, int64_t number) {
    int64_t item = shared_split(c, number).item;
    if (const auto *total = folded<typename P::Number>(c, number, column_numbers(c)))
        P::write_column(c, column_head(c, item), col_tokens(c, item % c.index.n_cols), total);
}

// The gradients of one row tile of queries, or a shared split of them.
template <class P> void row_item(const ringtile_call &c, int64_t number, typename P::Number *memory) {
    bool is_shared_split = number < c.backward.n_shared_splits;
    int64_t item = is_shared_split ? shared_split(c, number).item : number - c.backward.n_shared_splits;
    int64_t size = key_numbers(c);
    if (!is_shared_split && is_shared(c, item)) return;
    BackwardScratch<P> to(c, memory);
    P products(c, to.products);
    const Head head(c, item / c.index.n_rows);
    const Side queries = row_tokens(c, item % c.index.n_rows);
    products.pack_row(head, queries);
    int64_t slot = head.group * c.index.n_rows + item % c.index.n_rows, splits = c.backward.row_splits[slot];
    TileCursor tiles = row_tiles(c, slot);
    if (is_shared_split) {
        const SharedSplit &split = shared_split(c, number);
        tiles.skip(split.first);
        return sum_row(c, head, queries, tiles, split.last - split.first, products,
                       (typename P::Number *)c.work.scratch + number * size);
    }
    for (int64_t split = 0; split < splits; split++) {
        int64_t from = split_begin(tiles.length(), splits, split);
        sum_row(c, head, queries, tiles, split_begin(tiles.length(), splits, split + 1) - from, products, to.sums);
        if (splits > 1) add_up(to.totals, to.sums, size, split == 0);
    }
    write_queries<P>(c, head, queries, splits > 1 ? to.totals : to.sums, (typename P::Element *)c.backward.q_grad);
}

// Write the sum of a row's shared splits if `number` is the first of them.
template <class P> void fold_row(const ringtile_call &c, int64_t number) {
    int64_t item = shared_split(c, number).item;
    if (const auto *total = folded<typename P::Number>(c, number, key_numbers(c)))
        write_queries<P>(c, Head(c, item / c.index.n_rows), row_tokens(c, item % c.index.n_rows), total,
                         (typename P::Element *)c.backward.q_grad);
}

}  // namespace ISA
