// The backward pass, from the output and lse of the full softmax. Tiles are computed in two forms: by columns (gradients
// of keys and values, and of queries if a thread has a whole head) and by rows (gradients of queries). Both add the same
// products in the same order, so they agree to the last bit. If the layout splits a list, each split is summed from zero
// and the sums are added in their order, no matter which threads computed them.
#pragma once
#include "gradients.h"

namespace ISA {

template <class P> struct BackwardScratch {
    typedef typename P::Number T;
    T *sums, *totals, *products;  // sums of keys, then values, or of queries

    static int64_t sums_size(const ringtile_call &c) { return (c.head_dim + c.value_dim) * MAX_BLOCK; }
    static int64_t size(const ringtile_call &c) { return 2 * sums_size(c) + P::size(c); }

    BackwardScratch(const ringtile_call &c, T *x) : sums(x), totals(x + sums_size(c)), products(totals + sums_size(c)) {}
};

template <class T> INLINE const T *delta_of(const ringtile_call &c, const Head &head) {
    return (const T *)c.delta + 2 * head.number * c.n_queries;
}
template <class T> INLINE const T *lse2_of(const ringtile_call &c, const Head &head) {
    return delta_of<T>(c, head) + c.n_queries;
}

// For each query of a head: rowsum(out_grad * out) - lse_grad, and lse in base 2, +inf for a query that keeps no keys.
template <class E, class T> void delta_item(const ringtile_call &c, int64_t number) {
    constexpr int L = Lanes<T>::count;
    const Head head(c, number);
    const Tokens all = {};
    Rows<E> out = rows_of<E>(c.out, c.out_stride, head.b, head.h, all), grad = out_grad_rows<E>(c, head, all);
    const T *lse = (const T *)c.lse + number * c.n_queries;
    const T *lse_grad = c.lse_grad ? (const T *)c.lse_grad + number * c.n_queries : nullptr;
    T *delta = (T *)delta_of<T>(c, head), *lse2 = (T *)lse2_of<T>(c, head);
    for (int64_t i = 0; i < c.n_queries; i++) {
        bool empty = lse[i] == -infinity<T>();
        Vec<T> sums = {};
        for (int64_t d = 0; d < c.value_dim && !empty; d += L) {
            int count = (int)min(L, c.value_dim - d);
            sums += load_row<E, T>(out.row(i) + d, count) * load_row<E, T>(grad.row(i) + d, count);
        }
        T sum = 0;
        for (int l = 0; l < L; l++) sum += sums[l];
        delta[i] = empty ? T(0) : lse_grad ? sum - lse_grad[i] : sum;
        lse2[i] = empty ? infinity<T>() : lse[i] * T(1.44269504088896340736);
    }
}

// The first tile of a split of a list.
INLINE int64_t split_begin(int64_t length, int64_t splits, int64_t split) { return length * split / splits; }

// Add the sums of a split to the total of the splits before it.
template <class T> INLINE void add_up(T *total, const T *sums, int64_t count, bool first) {
    for (int64_t i = 0; i < count; i++) total[i] = first ? sums[i] : total[i] + sums[i];
}

template <class T> INLINE void clear(T *sums, int64_t count) {
    for (int64_t i = 0; i < count; i++) sums[i] = 0;
}

// The same for the lanes of existing tokens in rows [d][lane]. No one reads the others.
template <class T> INLINE void clear_lanes(T *sums, int64_t width, Tokens side) {
    constexpr int L = Lanes<T>::count;
    const int from = side.low / L * L, end = (side.high + L - 1) / L * L;
    for (int64_t d = 0; d < width; d++) clear(sums + d * MAX_BLOCK + from, end - from);
}

// The memory in which a thread that goes through the columns sums the gradients of a row's queries. Splits after the
// first have a buffer of their own, which is added to the total after their last tile.
template <class T> struct RowSums {
    T *total, *at;
    bool ends;
};

template <class T>
INLINE RowSums<T> row_sums(const ringtile_call &c, T *total, const Head &head, int64_t slot, int64_t col, int64_t count) {
    int64_t splits = c.row_splits[slot];
    if (splits == 1) return {total, total, false};
    Tiles tiles = row_tiles(c, slot);
    int64_t length = tiles.length(), number = tiles.before(col), split = ((number + 1) * splits - 1) / length;
    if (split == 0) return {total, total, false};
    T *buffer = (T *)c.row_buffers + (head.number * c.n_row_buffers + c.row_buffer[slot]) * MAX_BLOCK * c.head_dim;
    if (number == split_begin(length, splits, split)) clear(buffer, count);
    return {total, buffer, number + 1 == split_begin(length, splits, split + 1)};
}

// The next `count` tiles of a column's list: sums of key and value gradients, and gradients of queries if `with_rows`.
template <class P>
void sum_column(const ringtile_call &c, const Head &head, int64_t col, Tiles &tiles, int64_t count, P &products,
                typename P::Number *sums, bool with_rows) {
    typedef typename P::Number T;
    Dropout random = dropout_of(c, head);
    int64_t row, number;
    while (count-- > 0 && tiles.next(row, number)) {
        Tokens queries = row_tokens(c, row);
        GradientTile<T, true> tile(c, head, random, queries, col_tokens(c, col), number,
                                   lse2_of<T>(c, head) + queries.first, delta_of<T>(c, head) + queries.first);
        RowSums<T> own = {};
        int64_t numbers = (queries.high - queries.low) * c.head_dim;
        T *grad = (T *)c.q_grad + (head.number * c.n_queries + queries.first + queries.low) * c.head_dim;
        if (with_rows) own = row_sums<T>(c, grad, head, head.group * c.n_rows + row, col, numbers);
        products.column_tile(tile, sums, sums + c.head_dim * MAX_BLOCK, own.at);
        if (own.ends) add_up(own.total, own.at, numbers, false);
    }
}

// The same for a row's list, from statistics that are padded to whole vectors: sums of query gradients.
template <class P>
void sum_row(const ringtile_call &c, const Head &head, Tokens queries, Tiles &tiles, int64_t count, P &products,
             typename P::Number *sums) {
    typedef typename P::Number T;
    // Lanes without a query get lse = +inf, which makes their weights zero.
    T lse2[MAX_BLOCK], delta[MAX_BLOCK];
    for (int lane = 0; lane < MAX_BLOCK; lane++) {
        bool inside = lane >= queries.low && lane < queries.high;
        lse2[lane] = inside ? lse2_of<T>(c, head)[queries.first + lane] : infinity<T>();
        delta[lane] = inside ? delta_of<T>(c, head)[queries.first + lane] : T(0);
    }
    Dropout random = dropout_of(c, head);
    clear_lanes(sums, c.head_dim, queries);
    int64_t col, number;
    while (count-- > 0 && tiles.next(col, number))
        products.row_tile(GradientTile<T, false>(c, head, random, queries, col_tokens(c, col), number, lse2, delta), sums);
}

// Write sums [d][key] of keys, then of values, to the gradients of a column.
template <class E, class T>
void write_column(const ringtile_call &c, const Head &head, Tokens keys, const T *sums) {
    int64_t at = (head.b * c.kv_heads + head.kv) * c.n_keys + keys.first;
    T ones[MAX_BLOCK];
    for (T &share : ones) share = 1;
    transpose_out<E, T>(sums, c.head_dim, 0, keys.high, ones, (E *)c.k_grad + at * c.head_dim, c.head_dim);
    transpose_out<E, T>(sums + c.head_dim * MAX_BLOCK, c.value_dim, 0, keys.high, ones,
                        (E *)c.v_grad + at * c.value_dim, c.value_dim);
}

// Write sums [d][lane] to the gradients of a row's queries, zero for a query that keeps no keys.
template <class E, class T>
void write_queries(const ringtile_call &c, const Head &head, Tokens queries, const T *sums) {
    E *grad = (E *)c.q_grad + (head.number * c.n_queries + queries.first) * c.head_dim;
    const T *lse2 = lse2_of<T>(c, head) + queries.first;
    T share[MAX_BLOCK] = {};
    for (int lane = queries.low; lane < queries.high; lane++) share[lane] = lse2[lane] == infinity<T>() ? T(0) : T(1);
    transpose_out<E, T>(sums, c.head_dim, queries.low, queries.high, share, grad, c.head_dim);
}

// The gradients of one column tile of a key head, summed over its query heads in their order: in one chain, or split by
// split if the list of any of them is split.
template <class P>
void column(const ringtile_call &c, int64_t b, int64_t kv, int64_t col, typename P::Number *memory, bool with_rows) {
    BackwardScratch<P> to(c, memory);
    P products(c, to.products);
    int64_t ratio = c.heads / c.kv_heads, size = to.sums_size(c), begin = b * c.heads + kv * ratio;
    const Tokens keys = col_tokens(c, col);
    products.pack_column(Head(c, begin), keys, with_rows);
    clear_lanes(to.sums, c.head_dim + c.value_dim, keys);
    bool cut = false, first = true;
    for (int64_t number = begin; number < begin + ratio; number++)
        cut |= c.col_splits[Head(c, number).group * c.n_cols + col] > 1;
    for (int64_t number = begin; number < begin + ratio; number++) {
        const Head head(c, number);
        int64_t slot = head.group * c.n_cols + col, splits = c.col_splits[slot];
        Tiles tiles = col_tiles(c, slot);
        for (int64_t split = 0; split < splits; split++) {
            int64_t from = split_begin(tiles.length(), splits, split);
            if (!first) clear_lanes(to.sums, c.head_dim + c.value_dim, keys);
            sum_column(c, head, col, tiles, split_begin(tiles.length(), splits, split + 1) - from, products, to.sums,
                       with_rows);
            if (!cut) continue;
            add_up(to.totals, to.sums, size, first);
            first = false;
        }
    }
    write_column<typename P::Element>(c, Head(c, begin), keys, cut ? to.totals : to.sums);
}

// All columns of a key head (`item`), with the gradients of its queries: five products per tile instead of seven.
template <class P> void head_item(const ringtile_call &c, int64_t item, typename P::Number *memory) {
    for (int64_t col = c.first_col; col < c.last_col; col++)
        column<P>(c, item / c.kv_heads, item % c.kv_heads, col, memory, true);
}

// A split of a row or column (`item`) that several threads share.
struct SharedSplit {
    int64_t item, head, first, last;
};

INLINE const SharedSplit &shared_split(const ringtile_call &c, int64_t number) {
    return ((const SharedSplit *)c.shared_splits)[number];
}

// True if several threads share a row or column. The shared splits are sorted.
INLINE bool is_shared(const ringtile_call &c, int64_t item) {
    int64_t at = bisect(c.n_shared_splits, [&](int64_t i) { return shared_split(c, i).item < item; });
    return at < c.n_shared_splits && shared_split(c, at).item == item;
}

// The sums of all shared splits of an item, added in order into the first. Null if `number` is another split.
template <class T> T *folded(const ringtile_call &c, int64_t number, int64_t size) {
    int64_t item = shared_split(c, number).item;
    if (number > 0 && shared_split(c, number - 1).item == item) return nullptr;
    T *total = (T *)c.scratch + number * size;
    for (int64_t at = number + 1; at < c.n_shared_splits && shared_split(c, at).item == item; at++)
        add_up(total, (const T *)c.scratch + at * size, size, false);
    return total;
}

// The first of the query heads of a column item.
INLINE Head column_head(const ringtile_call &c, int64_t item) {
    return Head(c, item / c.n_cols * (c.heads / c.kv_heads));
}

template <class P> void column_item(const ringtile_call &c, int64_t number, typename P::Number *memory) {
    int64_t item = number < c.n_shared_splits ? shared_split(c, number).item : number - c.n_shared_splits, col = item % c.n_cols;
    if (number >= c.n_shared_splits) {
        const Head head = column_head(c, item);
        if (!is_shared(c, item)) column<P>(c, head.b, head.kv, col, memory, false);
        return;
    }
    const SharedSplit &split = shared_split(c, number);
    const Head head(c, split.head);
    BackwardScratch<P> to(c, memory);
    P products(c, to.products);
    products.pack_column(head, col_tokens(c, col), false);
    typename P::Number *sums = (typename P::Number *)c.scratch + number * to.sums_size(c);
    clear(sums, to.sums_size(c));
    Tiles tiles = col_tiles(c, head.group * c.n_cols + col);
    tiles.skip(split.first);
    sum_column(c, head, col, tiles, split.last - split.first, products, sums, false);
}

// Write the sum of a column's shared splits if `number` is the first of them.
template <class E, class T> void fold_column(const ringtile_call &c, int64_t number) {
    int64_t item = shared_split(c, number).item;
    if (const T *total = folded<T>(c, number, (c.head_dim + c.value_dim) * MAX_BLOCK))
        write_column<E>(c, column_head(c, item), col_tokens(c, item % c.n_cols), total);
}

// The gradients of one row tile of queries, or a shared split of them.
template <class P> void row_item(const ringtile_call &c, int64_t number, typename P::Number *memory) {
    bool is_shared_split = number < c.n_shared_splits;
    int64_t item = is_shared_split ? shared_split(c, number).item : number - c.n_shared_splits, size = c.head_dim * MAX_BLOCK;
    if (!is_shared_split && is_shared(c, item)) return;
    BackwardScratch<P> to(c, memory);
    P products(c, to.products);
    const Head head(c, item / c.n_rows);
    const Tokens queries = row_tokens(c, item % c.n_rows);
    products.pack_row(head, queries);
    int64_t slot = head.group * c.n_rows + item % c.n_rows, splits = c.row_splits[slot];
    Tiles tiles = row_tiles(c, slot);
    if (is_shared_split) {
        const SharedSplit &split = shared_split(c, number);
        tiles.skip(split.first);
        return sum_row(c, head, queries, tiles, split.last - split.first, products,
                       (typename P::Number *)c.scratch + number * size);
    }
    for (int64_t split = 0; split < splits; split++) {
        int64_t from = split_begin(tiles.length(), splits, split);
        sum_row(c, head, queries, tiles, split_begin(tiles.length(), splits, split + 1) - from, products, to.sums);
        if (splits > 1) add_up(to.totals, to.sums, size, split == 0);
    }
    write_queries<typename P::Element>(c, head, queries, splits > 1 ? to.totals : to.sums);
}

// Write the sum of a row's shared splits if `number` is the first of them.
template <class E, class T> void fold_row(const ringtile_call &c, int64_t number) {
    int64_t item = shared_split(c, number).item;
    if (const T *total = folded<T>(c, number, c.head_dim * MAX_BLOCK))
        write_queries<E>(c, Head(c, item / c.n_rows), row_tokens(c, item % c.n_rows), total);
}

}  // namespace ISA
