// The backward pass, from the output and lse of the whole softmax. Two forms of one tile's work: by columns (keys in the
// lanes; gradients of keys and values, of queries too where a thread has a whole head) and by rows (queries in the
// lanes; gradients of queries). Both add the same products in the same order, so they agree to the last bit. A list that
// the layout cuts is summed in pieces, each from zero, and the pieces in their order, whoever computes them.
#pragma once
#include "dropout.h"
#include "matmul.h"

namespace ISA {

template <class T> struct BackwardScratch {
    static constexpr int L = Lanes<T>::count, GROUP = TILE_VECTORS * L;
    int64_t width;
    T *keys_t, *values_t, *keys, *keys_held, *queries, *out_grads, *query_sums, *scores, *grads;
    T *sums, *totals;  // of keys, then values; of queries where rows are computed

    static int64_t padded(const ringtile_call &c) { return (c.head_dim + L - 1) / L * L; }
    static int64_t size(const ringtile_call &c) {
        return (4 * c.head_dim + 4 * c.value_dim + 3 * padded(c) + 2 * GROUP) * MAX_BLOCK;
    }

    BackwardScratch(const ringtile_call &c, T *x) : width(padded(c)) {
        T **places[] = {&keys, &keys_held, &query_sums, &scores, &grads, &keys_t, &queries, &values_t, &out_grads,
                        &sums, &totals};
        int64_t both = c.head_dim + c.value_dim;
        int64_t widths[] = {width, width, width, GROUP, GROUP, c.head_dim, c.head_dim, c.value_dim, c.value_dim,
                            both, both};
        for (int i = 0; i < 11; i++) {
            *places[i] = x;
            x += widths[i] * MAX_BLOCK;
        }
    }
};

// For every query of a head: rowsum(out_grad * out) - lse_grad, and lse in base 2; +inf where the query keeps nothing.
template <class E, class T> void delta_item(const ringtile_call &c, int64_t head) {
    constexpr int L = Lanes<T>::count;
    int64_t b = head / c.heads, h = head % c.heads;
    Rows<E> out = rows_of<E>(c.out, c.out_stride, b, h, 0), grad = rows_of<E>(c.out_grad, c.out_grad_stride, b, h, 0);
    const T *lse = (const T *)c.lse + head * c.n_queries;
    const T *lse_grad = c.lse_grad ? (const T *)c.lse_grad + head * c.n_queries : nullptr;
    T *delta = (T *)c.delta + 2 * head * c.n_queries, *lse2 = delta + c.n_queries;
    for (int64_t i = 0; i < c.n_queries; i++) {
        bool empty = lse[i] == -infinity<T>();
        Vec<T> sums = {};
        for (int64_t d = 0; d < c.value_dim && !empty; d += L) {
            int count = (int)least(L, c.value_dim - d);
            sums += load_row<E, T>(out.x + i * out.step + d, count) * load_row<E, T>(grad.x + i * grad.step + d, count);
        }
        T sum = 0;
        for (int l = 0; l < L; l++) sum += sums[l];
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

// Where piece `piece` of a list begins.
INLINE int64_t piece_begin(int64_t length, int64_t pieces, int64_t piece) { return length * piece / pieces; }

// How many of an ascending list are below a number.
INLINE int64_t count_below(const int32_t *list, int64_t count, int64_t number) {
    int64_t low = 0;
    while (count > 0) {
        int64_t half = count / 2;
        if (list[low + half] < number) low += half + 1, count -= half + 1;
        else count = half;
    }
    return low;
}

// Where a thread that goes through the columns sums the gradients of a row's queries: in their place; but the pieces
// after the first of a row that is cut are held apart, and added where they end.
template <class T> struct RowSums {
    T *whole, *at;
    bool ends;
};

template <class T>
INLINE RowSums<T> row_sums(const ringtile_call &c, T *whole, int64_t head, int64_t slot, int64_t col, int64_t numbers) {
    int64_t pieces = c.row_splits[slot];
    if (pieces == 1) return {whole, whole, false};
    Tiles tiles = tiles_of(c.full_row_ptr, c.full_col, c.part_row_ptr, c.part_col, c.part_tile, slot);
    int64_t length = tiles.n_full + tiles.n_part;
    int64_t number = count_below(tiles.full, tiles.n_full, col) + count_below(tiles.part, tiles.n_part, col);
    int64_t piece = ((number + 1) * pieces - 1) / length;
    if (piece == 0) return {whole, whole, false};
    T *held = (T *)c.row_buffers + (head * c.n_row_buffers + c.row_buffer[slot]) * MAX_BLOCK * c.head_dim;
    if (number == piece_begin(length, pieces, piece))
        for (int64_t i = 0; i < numbers; i++) held[i] = 0;
    return {whole, held, number + 1 == piece_begin(length, pieces, piece + 1)};
}

// Add the sums of a piece to the total of those before it.
template <class T> INLINE void add_up(T *total, const T *sums, int64_t count, bool first) {
    for (int64_t i = 0; i < count; i++) total[i] = first ? sums[i] : total[i] + sums[i];
}

// One column tile and head, tiles [from, until) of its list: sums of key and value gradients, and the gradients of queries
// where `query_grad` is given.
template <class E, class T>
void column_tiles(const ringtile_call &c, int64_t b, int64_t h, int64_t kv, int64_t col, int64_t from, int64_t until,
                  BackwardScratch<T> &to, T *query_grad) {
    constexpr int L = Lanes<T>::count, GROUP = TILE_VECTORS * L;
    constexpr bool same = sizeof(E) == sizeof(T);
    int64_t head = b * c.heads + h, group = group_of(c, b, h), row, tile;
    Span keys = col_span(c, col);
    int end = (keys.high + L - 1) / L * L;
    Tiles tiles = tiles_of(c.full_col_ptr, c.full_row, c.part_col_ptr, c.part_row, c.part_tile_t,
                           group * c.n_cols + col);
    Dropout random = dropout_of(c, b, h);
    Rows<E> key_rows = rows_of<E>(c.k, c.k_stride, b, kv, keys.first);
    T *key_sums = to.sums, *value_sums = key_sums + c.head_dim * MAX_BLOCK;
    for (int64_t number = 0; number < until && tiles.next(row, tile); number++) {
        if (number < from) continue;
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
            Packing packing(c);
            uint32_t dead[MAX_WORDS];
            shifted(u.queries, low, dead);
            copy_in(query_rows, count, c.head_dim, c.head_dim, dead, to.queries);
            copy_in(grad_rows, count, c.value_dim, c.value_dim, dead, to.out_grads);
            query = to.queries, query_step = c.head_dim, grad = to.out_grads, grad_step = c.value_dim;
        }
        if (query_grad && u.any_keys) {
            Packing packing(c);
            copy_in(key_rows, keys.high, c.head_dim, to.width, u.keys, to.keys_held);
            key = to.keys_held;
        }
        int64_t numbers = count * c.head_dim;
        RowSums<T> own = {};
        if (query_grad)
            own = row_sums<T>(c, query_grad + first * c.head_dim, head, group * c.n_rows + row, col, numbers);
        T *sums = own.at;
        bool direct = to.width == c.head_dim;
        if (sums && !direct) copy_in(Rows<T>{sums, c.head_dim}, count, c.head_dim, to.width, nullptr, to.query_sums);
        for (int lane = 0; lane < end; lane += GROUP) {
            int vectors = (int)least(TILE_VECTORS, (end - lane) / L);
            Reach reach = reach_of(step.bits, step.words, u.any_queries ? u.queries : nullptr, lane,
                                   (int)least(lane + GROUP, keys.high), low, queries.high);
            if (reach.first >= reach.last) continue;
            int near = reach.last - reach.first, skipped = reach.first - low;
            const T *near_query = query + skipped * query_step, *near_grad = grad + skipped * grad_step;
            matmul<T, true>(vectors, near_query, query_step, to.keys_t + lane * c.head_dim, GROUP, to.scores,
                            GROUP, near, c.head_dim, false);
            matmul<T, true>(vectors, near_grad, grad_step, to.values_t + lane * c.value_dim, GROUP, to.grads,
                            GROUP, near, c.value_dim, false);
            grade_group<T, true>(vectors, to.scores, to.grads, reach.first, near, lane, step, lse2, delta);
            matmul<T, false>(vectors, near_grad, grad_step, to.scores, GROUP, value_sums + lane, MAX_BLOCK,
                             c.value_dim, near, true);
            matmul<T, false>(vectors, near_query, query_step, to.grads, GROUP, key_sums + lane, MAX_BLOCK,
                             c.head_dim, near, true);
            if (!sums) continue;
            T *place = (direct ? sums : to.query_sums) + skipped * to.width;
            for (int64_t d = 0; d < to.width; d += GROUP)
                matmul<T, true>((int)least(TILE_VECTORS, (to.width - d) / L), to.grads, GROUP,
                                key + lane * to.width + d, to.width, place + d, to.width, near,
                                least(GROUP, keys.high - lane), true);
        }
        if (sums && !direct)
            for (int i = 0; i < count; i++)
                __builtin_memcpy(sums + i * c.head_dim, to.query_sums + i * to.width, c.head_dim * sizeof(T));
        for (int64_t i = 0; own.ends && i < numbers; i++) own.whole[i] += sums[i];
    }
}

// A column tile of a key head, packed: what all its tiles are multiplied with.
template <class E, class T>
INLINE void pack_column(const ringtile_call &c, int64_t b, int64_t kv, Span keys, BackwardScratch<T> &to,
                        bool queries) {
    Packing packing(c);
    Rows<E> key_rows = rows_of<E>(c.k, c.k_stride, b, kv, keys.first);
    Rows<E> value_rows = rows_of<E>(c.v, c.v_stride, b, kv, keys.first);
    uint32_t dead[MAX_WORDS];
    bool masked = dropped_keys(c, b, keys, dead);
    transpose_in(key_rows, 0, keys.high, 0, MAX_BLOCK, c.head_dim, T(1), to.keys_t);
    transpose_in(value_rows, 0, keys.high, 0, MAX_BLOCK, c.value_dim, T(1), to.values_t);
    if (queries) copy_in(key_rows, keys.high, c.head_dim, to.width, masked ? dead : nullptr, to.keys);
}

template <class T> INLINE void clear(T *sums, int64_t count) {
    for (int64_t i = 0; i < count; i++) sums[i] = 0;
}

// Sums [d][key] of keys, then of values, to where the gradients of a column are.
template <class E, class T>
void write_column(const ringtile_call &c, int64_t b, int64_t kv, Span keys, const T *sums) {
    E *key_grad = (E *)c.k_grad + ((b * c.kv_heads + kv) * c.n_keys + keys.first) * c.head_dim;
    E *value_grad = (E *)c.v_grad + ((b * c.kv_heads + kv) * c.n_keys + keys.first) * c.value_dim;
    T whole[MAX_BLOCK];
    for (T &share : whole) share = 1;
    transpose_out<E, T>(sums, c.head_dim, 0, keys.high, whole, key_grad, c.head_dim);
    transpose_out<E, T>(sums + c.head_dim * MAX_BLOCK, c.value_dim, 0, keys.high, whole, value_grad, c.value_dim);
}

// The gradients of one column tile of a key head, all query heads that it serves summed in their order: in one chain,
// or piece by piece where the list of any of them is cut.
template <class E, class T>
void column(const ringtile_call &c, int64_t b, int64_t kv, int64_t col, T *memory, bool queries) {
    BackwardScratch<T> to(c, memory);
    int64_t ratio = c.heads / c.kv_heads, size = (c.head_dim + c.value_dim) * MAX_BLOCK;
    Span keys = col_span(c, col);
    pack_column<E, T>(c, b, kv, keys, to, queries);
    clear(to.sums, size);
    bool cut = false, first = true;
    for (int64_t h = kv * ratio; h < (kv + 1) * ratio; h++)
        cut |= c.col_splits[group_of(c, b, h) * c.n_cols + col] > 1;
    for (int64_t h = kv * ratio; h < (kv + 1) * ratio; h++) {
        T *query_grad = queries ? (T *)c.q_grad + (b * c.heads + h) * c.n_queries * c.head_dim : nullptr;
        int64_t slot = group_of(c, b, h) * c.n_cols + col, pieces = c.col_splits[slot];
        int64_t length = c.full_col_ptr[slot + 1] - c.full_col_ptr[slot] + c.part_col_ptr[slot + 1] -
                         c.part_col_ptr[slot];
        for (int64_t piece = 0; piece < pieces; piece++) {
            if (!first) clear(to.sums, size);
            column_tiles<E, T>(c, b, h, kv, col, piece_begin(length, pieces, piece),
                               piece_begin(length, pieces, piece + 1), to, query_grad);
            if (!cut) continue;
            add_up(to.totals, to.sums, size, first);
            first = false;
        }
    }
    write_column<E, T>(c, b, kv, keys, cut ? to.totals : to.sums);
}

// Columns of a key head (`item`), gradients of its queries included: five products a tile instead of seven.
template <class E, class T> void head_item(const ringtile_call &c, int64_t item, T *memory) {
    for (int64_t col = c.first_col; col < c.last_col; col++)
        column<E, T>(c, item / c.kv_heads, item % c.kv_heads, col, memory, true);
}

// A piece of a row or column that several threads compute.
struct Part {
    int64_t item, head, first, last;
};

INLINE Part part_of(const ringtile_call &c, int64_t number) {
    const int64_t *x = c.shared_splits + 4 * number;
    return {x[0], x[1], x[2], x[3]};
}

// Whether a row or column is among the parts, which are sorted.
INLINE bool in_parts(const ringtile_call &c, int64_t item) {
    int64_t low = 0, high = c.n_shared_splits;
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (c.shared_splits[4 * middle] < item) low = middle + 1;
        else high = middle;
    }
    return low < c.n_shared_splits && c.shared_splits[4 * low] == item;
}

// The sums of all parts of an item, in their order, in the place of the first; null where `number` is another one.
template <class T> T *folded(const ringtile_call &c, int64_t number, int64_t size) {
    int64_t item = part_of(c, number).item;
    if (number > 0 && part_of(c, number - 1).item == item) return nullptr;
    T *total = (T *)c.scratch + number * size;
    for (int64_t at = number + 1; at < c.n_shared_splits && part_of(c, at).item == item; at++)
        add_up(total, (const T *)c.scratch + at * size, size, false);
    return total;
}

template <class E, class T> void column_item(const ringtile_call &c, int64_t number, T *memory) {
    if (number >= c.n_shared_splits) {
        int64_t item = number - c.n_shared_splits, head = item / c.n_cols;
        if (!in_parts(c, item)) column<E, T>(c, head / c.kv_heads, head % c.kv_heads, item % c.n_cols, memory, false);
        return;
    }
    Part part = part_of(c, number);
    BackwardScratch<T> to(c, memory);
    int64_t head = part.item / c.n_cols, col = part.item % c.n_cols, b = head / c.kv_heads, kv = head % c.kv_heads;
    int64_t size = (c.head_dim + c.value_dim) * MAX_BLOCK;
    pack_column<E, T>(c, b, kv, col_span(c, col), to, false);
    clear(to.sums, size);
    column_tiles<E, T>(c, b, part.head % c.heads, kv, col, part.first, part.last, to, nullptr);
    __builtin_memcpy((T *)c.scratch + number * size, to.sums, size * sizeof(T));
}

// Write the parts of a column, of which `number` may be the first.
template <class E, class T> void fold_column(const ringtile_call &c, int64_t number) {
    int64_t item = part_of(c, number).item, head = item / c.n_cols;
    if (const T *total = folded<T>(c, number, (c.head_dim + c.value_dim) * MAX_BLOCK))
        write_column<E, T>(c, head / c.kv_heads, head % c.kv_heads, col_span(c, item % c.n_cols), total);
}

// Sums [d][lane] to where the gradients of a row's queries are; zero where lse is +inf.
template <class E, class T>
void write_queries(const ringtile_call &c, int64_t head, Span queries, const T *sums) {
    E *grad = (E *)c.q_grad + (head * c.n_queries + queries.first) * c.head_dim;
    const T *lse2 = (const T *)c.delta + (2 * head + 1) * c.n_queries + queries.first;
    T share[MAX_BLOCK] = {};
    for (int lane = queries.low; lane < queries.high; lane++) share[lane] = lse2[lane] == infinity<T>() ? T(0) : T(1);
    transpose_out<E, T>(sums, c.head_dim, queries.low, queries.high, share, grad, c.head_dim);
}

// The gradients of one row tile of queries, whole or a part.
template <class E, class T> void row_item(const ringtile_call &c, int64_t number, T *memory) {
    constexpr int L = Lanes<T>::count, GROUP = TILE_VECTORS * L;
    constexpr bool same = sizeof(E) == sizeof(T);
    bool is_part = number < c.n_shared_splits;
    int64_t item = is_part ? part_of(c, number).item : number - c.n_shared_splits;
    if (!is_part && in_parts(c, item)) return;
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
    {
        Packing packing(c);
        Rows<E> query_rows = rows_of<E>(c.q, c.q_stride, b, h, queries.first + queries.low);
        Rows<E> grad_rows = rows_of<E>(c.out_grad, c.out_grad_stride, b, h, queries.first + queries.low);
        transpose_in(query_rows, queries.low, queries.high, from, end, c.head_dim, T(1), to.queries);
        transpose_in(grad_rows, queries.low, queries.high, from, end, c.value_dim, T(1), to.out_grads);
    }
    T *sums = to.sums;
    int64_t size = c.head_dim * MAX_BLOCK;
    clear(sums, size);
    Dropout random = dropout_of(c, b, h);
    int64_t slot = group_of(c, b, h) * c.n_rows + row, pieces = c.row_splits[slot], piece = 1;
    Tiles tiles = tiles_of(c.full_row_ptr, c.full_col, c.part_row_ptr, c.part_col, c.part_tile, slot);
    int64_t length = tiles.n_full + tiles.n_part, first = 0, last = length, col, tile;
    if (is_part) first = part_of(c, number).first, last = part_of(c, number).last;
    for (int64_t at = 0; at < last && tiles.next(col, tile); at++) {
        if (at < first) continue;
        if (!is_part && piece < pieces && at == piece_begin(length, pieces, piece)) {
            add_up(to.totals, sums, size, piece == 1);
            clear(sums, size);
            piece++;
        }
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
            Packing packing(c);
            const uint32_t *dead = u.any_keys ? u.keys : nullptr;
            copy_in(key_rows, keys.high, c.head_dim, c.head_dim, dead, to.keys);
            copy_in(value_rows, keys.high, c.value_dim, c.value_dim, dead, to.values_t);
            key = to.keys, key_step = c.head_dim;
            value = to.values_t, value_step = c.value_dim;
        }
        for (int lane = from; lane < end; lane += GROUP) {
            int vectors = (int)least(TILE_VECTORS, (end - lane) / L);
            Reach reach = reach_of(step.bits, step.words, u.any_keys ? u.keys : nullptr,
                                   (int)most(lane, queries.low), (int)least(lane + GROUP, queries.high), 0, keys.high);
            // From a multiple of as many keys as columns have in their lanes, and as many at a time: for the same bits.
            int skipped = reach.first / GROUP * GROUP, near = reach.last - skipped;
            if (near <= 0) continue;
            matmul<T, true>(vectors, key + skipped * key_step, key_step, to.queries + (lane - from) * c.head_dim, GROUP,
                            to.scores, GROUP, near, c.head_dim, false);
            matmul<T, true>(vectors, value + skipped * value_step, value_step,
                            to.out_grads + (lane - from) * c.value_dim, GROUP, to.grads, GROUP, near, c.value_dim,
                            false);
            grade_group<T, false>(vectors, to.scores, to.grads, skipped, near, lane, step, highs, means);
            for (int64_t k = 0; k < near; k += GROUP)
                matmul<T, false>(vectors, key + (skipped + k) * key_step, key_step, to.grads + k * GROUP, GROUP,
                                 sums + lane, MAX_BLOCK, c.head_dim, least(GROUP, near - k), true);
        }
    }
    if (is_part) {
        __builtin_memcpy((T *)c.scratch + number * size, sums, size * sizeof(T));
        return;
    }
    if (piece > 1) add_up(to.totals, sums, size, false);
    write_queries<E, T>(c, head, queries, piece > 1 ? to.totals : sums);
}

// Write the parts of a row, of which `number` may be the first.
template <class E, class T> void fold_row(const ringtile_call &c, int64_t number) {
    int64_t item = part_of(c, number).item;
    if (const T *total = folded<T>(c, number, c.head_dim * MAX_BLOCK))
        write_queries<E, T>(c, item / c.n_rows, row_span(c, item % c.n_rows), total);
}

}  // namespace ISA
