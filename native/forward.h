// The forward pass. A row tile's queries are in the lanes of vectors, so scores are [key][query]: the softmax runs along
// rows of vectors, and keys and values need no packing.
#pragma once
#include "bf16.h"
#include "decode.h"
#include "dropout.h"
#include "products.h"

namespace ISA {

// A work item: the tiles [first, last) in the list of one row tile and head.
struct RowItem {
    Head head;
    Tokens queries;
    int64_t slot, first, last, split, splits;

    INLINE RowItem(const ringtile_call &c, int64_t item, int64_t number) : head(c, number) {
        const int32_t *work = c.work + 5 * (c.work_begin[head.group] + item - c.item_begin[number]);
        slot = work[0], first = work[1], last = work[2], split = work[3], splits = work[4];
        queries = row_tokens(c, slot % c.n_rows);
    }
};

// The running softmax of a row tile, by lane: the maximum score in base 2, the sum of weights, and the weighted values
// [value_dim][MAX_BLOCK]. One after another they are also the form in which the splits of a row wait in scratch.
template <class T> struct Softmax {
    T *sums, *highest, *total;

    static int64_t size(const ringtile_call &c) { return (c.value_dim + 2) * MAX_BLOCK; }

    INLINE Softmax(const ringtile_call &c, T *x)
        : sums(x), highest(x + c.value_dim * MAX_BLOCK), total(highest + MAX_BLOCK) {}

    INLINE void clear(const ringtile_call &c, int from, int end) {
        for (int64_t d = 0; d < c.value_dim; d++)
            for (int lane = from; lane < end; lane++) sums[d * MAX_BLOCK + lane] = 0;
        for (int lane = from; lane < end; lane++) highest[lane] = -infinity<T>(), total[lane] = 0;
    }
};

template <class P> struct ForwardScratch {
    typedef typename P::Number T;
    T *softmax, *scores, *products;

    static int64_t size(const ringtile_call &c) {
        int64_t decode = Plain<typename P::Element, T>::size(c) + DECODE_QUERIES * (c.head_dim + c.value_dim + MAX_BLOCK);
        return Softmax<T>::size(c) + GROUP<T> * MAX_BLOCK + max(P::size(c), decode);
    }

    ForwardScratch(const ringtile_call &c, T *x) {
        softmax = x;
        scores = softmax + Softmax<T>::size(c);
        products = scores + GROUP<T> * MAX_BLOCK;
    }
};

// A positive scale of scores in base 2. Its sign, or a zero, goes into the queries.
template <class T> INLINE T base_of(const ringtile_call &c) {
    return c.scale == 0 ? T(1) : (T)(__builtin_fabs(c.scale) * 1.44269504088896340736);
}
template <class T> INLINE T sign_of(const ringtile_call &c) { return c.scale < 0 ? T(-1) : T(c.scale != 0); }

// The kept pairs of a tile: a row of bits per key, and the keys that no query keeps. Both can be null.
struct Mask {
    const int32_t *bits;
    int words;
    const uint32_t *unused;

    INLINE bool partial() const { return bits || unused; }
    INLINE bool drops(int key) const { return unused && bit(unused, key); }
    // A tile that serves all lengths may hold only pairs of other queries.
    INLINE bool keeps_nothing(Tokens keys) const {
        for (int k = keys.low; k < keys.high; k++)
            if (!drops(k)) return false;
        return true;
    }
};

INLINE Mask mask_of(const ringtile_call &c, int64_t b, Tokens queries, Tokens keys, int64_t tile, uint32_t *unused) {
    int words = words_of(c);
    bool any = masked_keys(c, b, keys, unused);
    if (tile >= 0) {
        add_unused(c, c.cols_any, c.bits_t, tile, keys, queries, unused);
        any |= any_of(unused, keys);
    }
    return {tile >= 0 ? c.bits_t + tile * c.block * words : nullptr, words, any ? unused : nullptr};
}

// The highest of the scores [count][GROUP] of keys that start at `first`. Scores that the mask drops become -inf.
template <class T, int N>
INLINE void highest_scores(T *scores, int first, int count, int lane, const Mask &mask, Vec<T> *top) {
    constexpr int L = Lanes<T>::count;
    const T low = -infinity<T>();
    for (int n = 0; n < N; n++) top[n] = splat<T>(low);
    for (int k = 0; k < count && !mask.partial(); k++)
        for (int n = 0; n < N; n++) top[n] = max<T>(top[n], load(scores + k * GROUP<T> + n * L));
    for (int k = 0; k < count && mask.partial(); k++) {
        bool dropped = mask.drops(first + k);
        for (int n = 0; n < N; n++) {
            T *at = scores + k * GROUP<T> + n * L;
            Vec<T> s = dropped ? splat<T>(low) : load(at);
            if (mask.bits && !dropped)
                s = lanes_of<T>(mask.bits + (first + k) * mask.words, lane + n * L) ? s : splat<T>(low);
            store(at, s);
            top[n] = max<T>(top[n], s);
        }
    }
}

// One step of the online softmax over `count` keys that start at `first`: scores [count][GROUP] become weights.
template <class T, int N>
void online_softmax_step(T *scores, int first, int count, int lane, T scale, const Mask &mask, Softmax<T> softmax,
                         int64_t value_dim) {
    constexpr int L = Lanes<T>::count;
    const T low = -infinity<T>();
    const bool partial = mask.partial();
    Vec<T> share[N], sum[N] = {}, safe[N];
    highest_scores<T, N>(scores, first, count, lane, mask, share);
    bool moved = false;
    for (int n = 0; n < N; n++) {
        T *at = softmax.highest + lane + n * L;
        Vec<T> before = load(at), now = max<T>(before, share[n] * scale);
        store(at, now);
        safe[n] = now == low ? Vec<T>{} : now;
        Ints<T> rose = now > before;
        typename Lanes<T>::integer any = 0;
        for (int i = 0; i < L; i++) any |= rose[i];
        share[n] = exp2<T>(before - safe[n]);
        moved |= any != 0;
    }
    for (int64_t d = 0; d < value_dim && moved; d++)
        for (int n = 0; n < N; n++) {
            T *at = softmax.sums + d * MAX_BLOCK + lane + n * L;
            store(at, load(at) * share[n]);
        }
    for (int k = 0; k < count; k++)
        for (int n = 0; n < N; n++) {
            T *at = scores + k * GROUP<T> + n * L;
            Vec<T> s = load(at), p = exp2<T>(s * scale - safe[n]);
            if (partial) p = s == low ? Vec<T>{} : p;
            store(at, p);
            sum[n] += p;
        }
    for (int n = 0; n < N; n++) {
        T *at = softmax.total + lane + n * L;
        store(at, load(at) * share[n] + sum[n]);
    }
}

// Zero the weights [count][GROUP] of the pairs that dropout drops. `keep` starts at the first key.
template <class T>
INLINE void drop_weights(T *weights, int count, int vectors, int lane, const uint32_t (*keep)[MAX_WORDS]) {
    constexpr int L = Lanes<T>::count;
    for (int k = 0; k < count; k++)
        for (int n = 0; n < vectors; n++) {
            T *at = weights + k * GROUP<T> + n * L;
            store(at, lanes_of<T>((const int32_t *)keep[k], lane + n * L) ? load(at) : Vec<T>{});
        }
}

// The tiles of a row item, by the products of a policy.
template <class P> void attend_row(const ringtile_call &c, const RowItem &row, ForwardScratch<P> &to) {
    typedef typename P::Number T;
    constexpr int L = Lanes<T>::count;
    const Tokens queries = row.queries;
    const int from = queries.low / L * L, end = (queries.high + L - 1) / L * L;
    const T base = base_of<T>(c);
    P products(c, to.products);
    products.pack_queries(row.head, queries, from, end, sign_of<T>(c));
    Softmax<T> softmax(c, to.softmax);
    softmax.clear(c, from, end);
    Dropout random = dropout_of(c, row.head);
    Tiles tiles = row_tiles(c, row.slot);
    tiles.skip(row.first);
    int64_t col, tile;
    for (int64_t number = row.first; number < row.last && tiles.next(col, tile); number++) {
        Tokens keys = col_tokens(c, col);
        uint32_t unused[MAX_WORDS], keep[MAX_BLOCK][MAX_WORDS];
        Mask mask = mask_of(c, row.head.b, queries, keys, tile, unused);
        if (mask.keeps_nothing(keys)) continue;
        products.load_tile(row.head, keys, mask.unused);
        if (c.dropout_threshold) dropout_bits<false>(random, queries, keys, keep);
        for (int lane = from; lane < end; lane += GROUP<T>) {
            int vectors = (int)min(TILE_VECTORS, (end - lane) / L);
            Reach reach = reach_of(mask.bits, mask.words, mask.unused, (int)max(lane, queries.low),
                                   (int)min(lane + GROUP<T>, queries.high), 0, keys.high);
            if (reach.first >= reach.last) continue;
            int first = reach.first / P::KEY_STEP * P::KEY_STEP, count = reach.last - first;
            products.scores(vectors, lane - from, first, count, to.scores);
            with_constant<TILE_VECTORS>(vectors, [&](auto n) INLINE_LAMBDA {
                online_softmax_step<T, decltype(n)::value>(to.scores, first, count, lane, base, mask, softmax, c.value_dim);
            });
            if (c.dropout_threshold) drop_weights(to.scores, count, vectors, lane, keep + first);
            products.add_values(vectors, first, count, to.scores, softmax.sums + lane);
        }
    }
}

// The same for a few queries.
template <class P> void decode_row(const ringtile_call &c, const RowItem &row, ForwardScratch<P> &to) {
    typedef typename P::Element E;
    typedef typename P::Number T;
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
    softmax.clear(c, low, low + n_queries);
    for (int64_t i = 0; i < n_queries * c.value_dim; i++) sums[i] = 0;
    Tiles tiles = row_tiles(c, row.slot);
    tiles.skip(row.first);
    int64_t col, tile;
    for (int64_t number = row.first; number < row.last && tiles.next(col, tile); number++) {
        Tokens keys = col_tokens(c, col);
        uint32_t unused[MAX_WORDS];
        Mask mask = mask_of(c, row.head.b, row.queries, keys, tile, unused);
        if (mask.keeps_nothing(keys)) continue;
        products.load_tile(row.head, keys, mask.unused);
        decode_scores({queries, c.head_dim}, n_queries, products.keys, keys.high, c.head_dim, weights);
        for (int r = 0; mask.partial() && r < n_queries; r++) {
            int lane = low + r;
            for (int k = 0; k < keys.high; k++) {
                bool kept = !mask.bits || (mask.bits[k * mask.words + (lane >> 5)] >> (lane & 31) & 1);
                if (!kept || mask.drops(k)) weights[r * MAX_BLOCK + k] = -infinity<T>();
            }
        }
        decode_softmax_step(weights, n_queries, keys.high, base_of<T>(c), mask.partial(), softmax.highest + low,
                            softmax.total + low, sums, c.value_dim);
        for (int64_t d = 0; d < c.value_dim; d += GROUP<T>)
            matmul<T, true>((int)min(TILE_VECTORS, (c.value_dim - d) / L), weights, MAX_BLOCK, products.values.x + d,
                            products.values.step, sums + d, c.value_dim, n_queries, keys.high, true);
    }
    for (int r = 0; r < n_queries; r++)
        for (int64_t d = 0; d < c.value_dim; d++) softmax.sums[d * MAX_BLOCK + low + r] = sums[r * c.value_dim + d];
}

// Write the output and lse of a row tile.
template <class E, class T> void write_row(const ringtile_call &c, const RowItem &row, const Softmax<T> &softmax) {
    const Tokens queries = row.queries;
    const Head &head = row.head;
    E *out = (E *)c.out + head.b * c.out_stride[0] + head.h * c.out_stride[1] + queries.first * c.out_stride[2];
    T *lse = (T *)c.lse + head.number * c.n_queries + queries.first;
    T kept = c.dropout_threshold ? T(65536.0 / (65536 - c.dropout_threshold)) : T(1), share[MAX_BLOCK] = {};
    for (int lane = queries.low; lane < queries.high; lane++) {
        T highest = softmax.highest[lane], total = softmax.total[lane];
        bool empty = highest == -infinity<T>() && total == 0;
        share[lane] = empty ? T(0) : kept / total;
        lse[lane] = empty ? -infinity<T>() : highest * T(0.69314718055994530942) + exact_log(total);
    }
    transpose_out<E, T>(softmax.sums, c.value_dim, queries.low, queries.high, share, out, c.out_stride[2]);
}

template <class P> void forward_item(const ringtile_call &c, int64_t item, int64_t head, typename P::Number *memory) {
    typedef typename P::Number T;
    ForwardScratch<P> to(c, memory);
    RowItem row(c, item, head);
    if (decodes<T>(c, row.queries)) decode_row<P>(c, row, to);
    else attend_row<P>(c, row, to);
    int64_t size = Softmax<T>::size(c);
    if (row.split < 0) write_row<typename P::Element, T>(c, row, Softmax<T>(c, to.softmax));
    else __builtin_memcpy((T *)c.scratch + (head * c.n_splits + row.split) * size, to.softmax, size * sizeof(T));
}

// Merge the splits of a row, in their order. `item` does so if it is the row's first.
template <class P> void combine_item(const ringtile_call &c, int64_t item, int64_t head, typename P::Number *memory) {
    typedef typename P::Number T;
    RowItem row(c, item, head);
    if (row.split < 0 || row.first != 0) return;
    int64_t size = Softmax<T>::size(c);
    Softmax<T> merged(c, memory), begin(c, (T *)c.scratch + (head * c.n_splits + row.split) * size);
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
            T share = m == -infinity<T>() ? T(0) : exp2<T>(splat<T>(m - safe))[0];
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
