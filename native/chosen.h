// Attention over lists of keys. The heads that share a key head are in the lanes of vectors. The keys of a list are gathered
// into tiles, and widened to float32 on the way, so that one kernel serves all dtypes. Few heads would leave lanes idle: the
// queries of a run, whose lists agree enough, fill them together, over the union of their lists.
#pragma once
#include "decode.h"
#include "softmax.h"

namespace ISA {

constexpr int LIST_TILE = 64, MAX_RUN = 16;

INLINE int64_t whole_vectors(int64_t dims) {
    constexpr int L = Lanes<float>::count;
    return (dims + L - 1) / L * L;
}

// The runs of a list group.
INLINE int64_t runs_of(const ringtile_call &c) { return (c.n_queries + c.lists.run - 1) / c.lists.run; }

// The places [first, last) in a list of the keys from `low` to `high` - 1: a place for each token of each entry.
struct KeyList {
    const int32_t *entries;
    int shift;
    int64_t first, last;

    KeyList(const ringtile_call &c, const int32_t *entries, int64_t length, int64_t low, int64_t high)
        : entries(entries), shift(__builtin_ctz((unsigned)c.block)), first(), last() {
        const int64_t block = c.block;
        auto begins = [&](int64_t i) { return entries[i] * block; };
        const int64_t from = bisect(length, [&](int64_t i) { return entries[i] >= 0 && begins(i) + block <= low; });
        const int64_t to = bisect(length, [&](int64_t i) { return entries[i] >= 0 && begins(i) < high; });
        if (from >= to) return;
        first = from * block + max(0, low - begins(from));
        last = max(first, to * block - max(0, begins(to - 1) + block - high));
    }
};

// Queries that are computed together, and some of the heads of their key head. Row r is head r % heads of query r / heads.
// `bits` has the queries of each entry of a union, and is null for one query.
struct ListItem {
    int64_t b, kv, head, skipped, query;  // skipped: heads of the key head
    int queries, heads, rows, end;        // end: the rows in whole vectors
    const int32_t *entries;
    const uint16_t *bits;
    int64_t length, low[MAX_RUN], high[MAX_RUN], lowest, highest;
    bool empty[MAX_RUN];
    // Where the backward pass leaves the weights [place][row of all heads], and the gradients of scores.
    float *weights, *slopes;

    INLINE ListItem(const ringtile_call &c, int64_t b, int64_t kv, int64_t part, int64_t run, int one)
        : b(b), kv(kv), bits(), length(c.lists.list_length), lowest(c.n_keys), highest(0) {
        const auto &lists = c.lists;
        const int64_t ratio = c.heads / c.kv_heads, group = kv * lists.list_groups / c.kv_heads;
        skipped = part * lists.list_rows, head = kv * ratio + skipped, heads = (int)min(lists.list_rows, ratio - skipped);
        query = run * lists.run + max(0, one);
        queries = one < 0 ? (int)min(lists.run, c.n_queries - query) : 1;
        rows = queries * heads, end = (int)whole_vectors(rows);
        for (int i = 0; i < queries; i++) {
            const int32_t *limits = lists.limits + b * lists.limits_stride + 2 * (query + i);
            entries = lists.indices + b * lists.indices_stride + (group * c.n_queries + query + i) * length;
            low[i] = max(0, limits[0]), high[i] = min(limits[1], c.n_keys);
            const KeyList own(c, entries, length, low[i], high[i]);
            empty[i] = own.first == own.last;
            if (!empty[i]) lowest = min(lowest, low[i]), highest = max(highest, high[i]);
        }
        const int64_t number = b * c.kv_heads + kv, at = (b * lists.list_groups + group) * runs_of(c) + run;
        const int64_t before = (number * (lists.last_run - lists.first_run) + run - lists.first_run) * lists.weights_room;
        weights = lists.weights ? lists.weights + before + max(0, one) * 2 * length * c.block * ratio : nullptr;
        if (one < 0) {
            length = lists.union_length[at];
            entries = lists.union_entries + at * lists.union_room, bits = lists.union_bits + at * lists.union_room;
        }
        slopes = weights ? weights + length * c.block * queries * ratio : nullptr;
    }

    INLINE KeyList list(const ringtile_call &c, int64_t from, int64_t to) const {
        return KeyList(c, entries, length, max(from, lowest), min(to, highest));
    }
};

// Call f with the queries of a run: all at once, or one after another if they have no union.
template <class F> INLINE void each_of_run(const ringtile_call &c, int64_t b, int64_t kv, int64_t part, int64_t run, F f) {
    const auto &lists = c.lists;
    const int64_t at = (b * lists.list_groups + kv * lists.list_groups / c.kv_heads) * runs_of(c) + run;
    const bool together = lists.run > 1 && lists.union_length[at] > 0;
    const int64_t count = together ? 1 : min(lists.run, c.n_queries - run * lists.run);
    for (int one = 0; one < count; one++) f(ListItem(c, b, kv, part, run, together ? -1 : one));
}

// Copy rows of any dtype, in whole vectors: the rows [0, count) without `places`, and zeros for a place below 0.
template <class E>
void copy_rows(const void *x, int64_t step, const int32_t *places, int count, int64_t width, float *y) {
    const int64_t padded = whole_vectors(width);
    for (int i = 0; i < count; i++) {
        const uint32_t unused = places && places[i] < 0;
        const E *row = (const E *)x + (places ? places[i] : i) * step;
        copy_in<E, float>({row, 0}, 1, width, padded, unused ? &unused : nullptr, y + i * padded);
    }
}
INLINE void copy_rows(const ringtile_call &c, const void *x, int64_t step, const int32_t *places, int count,
                      int64_t width, float *y) {
    switch (c.dtype) {
    case RINGTILE_FLOAT32: return copy_rows<float>(x, step, places, count, width, y);
    case RINGTILE_BFLOAT16: return copy_rows<bfloat16>(x, step, places, count, width, y);
    default: return copy_rows<float16>(x, step, places, count, width, y);
    }
}

// Write `count` sums, in whole vectors, to rows of any dtype, times a share of each. A share of zero writes zeros.
template <class E>
void write_rows(const float *sums, int count, int64_t width, const float *share, void *x, int64_t step) {
    constexpr int L = Lanes<float>::count;
    for (int i = 0; i < count; i++, sums += whole_vectors(width)) {
        E *row = (E *)x + i * step;
        for (int64_t d = 0; d < width; d += L) {
            const Vec<float> y = share[i] == 0 ? Vec<float>{} : load(sums + d) * share[i];
            E narrow[L];
            store_narrow<E, float>(narrow, y);
            __builtin_memcpy(row + d, narrow, min(L, width - d) * sizeof(E));
        }
    }
}
INLINE void write_rows(const ringtile_call &c, const float *sums, int count, int64_t width, const float *share, void *x,
                       int64_t step) {
    switch (c.dtype) {
    case RINGTILE_FLOAT32: return write_rows<float>(sums, count, width, share, x, step);
    case RINGTILE_BFLOAT16: return write_rows<bfloat16>(sums, count, width, share, x, step);
    default: return write_rows<float16>(sums, count, width, share, x, step);
    }
}

// The address of a row of a tensor.
INLINE char *row_at(const ringtile_call &c, const void *x, const int64_t *stride, int64_t b, int64_t h, int64_t n) {
    return (char *)x + (b * stride[0] + h * stride[1] + n * stride[2]) * (c.dtype == RINGTILE_FLOAT32 ? 4 : 2);
}

// Write the union of the lists of a run. Its length is 0 if its entries are in two lists or fewer, on average.
inline void list_union(const ringtile_call &c, int64_t number, float *memory) {
    const auto &lists = c.lists;
    const int64_t group = number / runs_of(c), b = group / lists.list_groups, first = number % runs_of(c) * lists.run;
    int32_t *entries = lists.union_entries + number * lists.union_room;
    uint16_t *bits = lists.union_bits + number * lists.union_room, *table = (uint16_t *)memory;
    int64_t listed = 0, begin = c.n_keys, end = 0, found = 0;
    auto each = [&](auto f) {
        for (int64_t i = 0; i < min(lists.run, c.n_queries - first); i++) {
            const int32_t *limits = lists.limits + b * lists.limits_stride + 2 * (first + i);
            const int32_t *own = lists.indices + b * lists.indices_stride +
                                 (group % lists.list_groups * c.n_queries + first + i) * lists.list_length;
            const KeyList list(c, own, lists.list_length, max(0, limits[0]), min(limits[1], c.n_keys));
            if (list.first < list.last) f(own, list.first >> list.shift, (list.last - 1) >> list.shift, (uint16_t)(1u << i));
        }
    };
    each([&](const int32_t *own, int64_t from, int64_t to, uint16_t) {
        begin = min(begin, own[from]), end = max(end, own[to] + 1), listed += to - from + 1;
    });
    for (int64_t i = begin; i < end; i++) table[i - begin] = 0;
    each([&](const int32_t *own, int64_t from, int64_t to, uint16_t bit) {
        for (int64_t k = from; k <= to; k++)
            if (own[k] >= begin && own[k] < end) table[own[k] - begin] |= bit;
    });
    for (int64_t i = begin; i < end && found <= lists.union_room; i++) {
        if (!table[i - begin]) continue;
        if (found < lists.union_room) entries[found] = (int32_t)i, bits[found] = table[i - begin];
        found++;
    }
    lists.union_length[number] = found <= lists.union_room && 2 * found <= listed ? found : 0;
}

struct ListScratch {
    float *rows, *grad_rows, *lanes, *grad_lanes, *keys, *values, *sums, *scores, *grads, *softmax, *decoded;

    static int64_t size(const ringtile_call &c) {
        const int64_t d = whole_vectors(c.head_dim), dv = whole_vectors(c.value_dim);
        const int64_t products = (max(c.heads / c.kv_heads, MAX_RUN) + MAX_BLOCK + LIST_TILE) * (d + dv) + MAX_BLOCK * max(d, dv) +
                                 2 * LIST_TILE * GROUP<float> + (2 + DECODE_QUERIES) * MAX_BLOCK;
        return max(products, c.work.phase == RINGTILE_LISTS_UNIONS ? c.n_keys / c.block / 2 + 1 : 0);
    }

    ListScratch(const ringtile_call &c, float *x) {
        const int64_t d = whole_vectors(c.head_dim), dv = whole_vectors(c.value_dim), all = max(c.heads / c.kv_heads, MAX_RUN);
        float **places[] = {&rows, &grad_rows, &lanes, &grad_lanes, &keys, &values, &sums, &scores, &grads, &softmax, &decoded};
        const int64_t counts[] = {all, all, MAX_BLOCK, MAX_BLOCK, LIST_TILE, LIST_TILE, MAX_BLOCK, LIST_TILE, LIST_TILE, 2, 0};
        const int64_t widths[] = {d, dv, d, dv, d, dv, max(d, dv), GROUP<float>, GROUP<float>, MAX_BLOCK, 0};
        for (int i = 0; i < 11; i++) *places[i] = x, x += counts[i] * widths[i];
    }
};

// The keys of a tile of places, -1 for one that no query keeps, and the rows that keep them if not all do.
struct ListKeys {
    int count;
    bool partial;
    int32_t keys[LIST_TILE], rows[LIST_TILE];

    INLINE ListKeys(const ringtile_call &c, const ListItem &item, const KeyList &list, int64_t place)
        : count((int)min(LIST_TILE, list.last - place)), partial(false) {
        const uint32_t all = (1u << item.queries) - 1;
        for (int k = 0; k < count; k++) {
            const int64_t at = place + k, key = ((int64_t)item.entries[at >> list.shift] << list.shift) + (at & (c.block - 1));
            // No list, sorted or not, leads out of a tensor.
            keys[k] = (int32_t)min(max(key, 0), c.n_keys - 1);
        }
        bool cut = false;
        for (int i = 0; item.bits && i < item.queries; i++) cut |= item.low[i] > keys[0] || item.high[i] <= keys[count - 1];
        for (int k = 0; item.bits && k < count; k++) {
            uint32_t kept = item.bits[(place + k) >> list.shift] & all, own = (1u << item.heads) - 1, of_rows = 0;
            for (int i = 0; cut && i < item.queries; i++)
                kept &= ~((uint32_t)(keys[k] < item.low[i] || keys[k] >= item.high[i]) << i);
            for (int i = 0; item.heads > 1 && i < item.queries; i++) of_rows |= kept >> i & 1 ? own << i * item.heads : 0;
            rows[k] = (int32_t)(item.heads > 1 ? of_rows : kept);
            partial |= kept != all;
            keys[k] = kept ? keys[k] : -1;
        }
    }

    INLINE Mask mask() const { return {partial ? rows : nullptr, 1, nullptr}; }
};

// A tile of gathered keys and values. Those of float32 that follow one another are read in place.
struct ListTile : ListKeys {
    Rows<float> k, v;

    ListTile(const ringtile_call &c, const ListItem &item, const KeyList &list, int64_t place, const ListScratch &to)
        : ListKeys(c, item, list, place) {
        bool follow = c.dtype == RINGTILE_FLOAT32;
        for (int i = 0; i < count; i++) follow &= keys[i] == keys[0] + i;
        auto gather = [&](const void *x, const int64_t *stride, int64_t width, float *copy) {
            const void *head = row_at(c, x, stride, item.b, item.kv, 0);
            const int64_t padded = whole_vectors(width);
            if (follow && padded == width) return Rows<float>{(const float *)head + keys[0] * stride[2], stride[2]};
            copy_rows(c, head, stride[2], keys, count, width, copy);
            return Rows<float>{copy, padded};
        };
        Packing packing(c);
        k = gather(c.k, c.k_stride, c.head_dim, to.keys);
        // The values of latent attention are the first dims of its keys.
        const bool same = c.v == c.k && c.v_stride[0] == c.k_stride[0] && c.v_stride[1] == c.k_stride[1] &&
                          c.v_stride[2] == c.k_stride[2] && c.value_dim <= c.head_dim;
        v = same ? k : gather(c.v, c.v_stride, c.value_dim, to.values);
    }
};

// Copy the rows of an item, zeros for a query that keeps no key: in a union, others' sums would meet its NaN.
INLINE void load_rows(const ringtile_call &c, const ListItem &item, int64_t head, int heads, const void *x, const int64_t *stride,
                      int64_t width, float *y) {
    const int64_t count = heads * whole_vectors(width);
    for (int i = 0; i < item.queries; i++) {
        if (item.empty[i]) __builtin_memset(y + i * count, 0, count * sizeof(float));
        else copy_rows(c, row_at(c, x, stride, item.b, head, item.query + i), stride[1], nullptr, heads, width, y + i * count);
    }
}

// The same, and in lanes, times a sign.
INLINE void load_lanes(const ringtile_call &c, const ListItem &item, const void *x, const int64_t *stride, int64_t width,
                       float sign, float *rows, float *lanes) {
    Packing packing(c);
    const int64_t padded = whole_vectors(width);
    load_rows(c, item, item.head, item.heads, x, stride, width, rows);
    for (int64_t i = 0; i < item.rows * padded && sign != 1; i++) rows[i] = sign == 0 ? 0 : sign * rows[i];
    transpose_in(Rows<float>{rows, padded}, 0, item.rows, 0, item.end, width, 1.0f, lanes);
}

// Scores [key][GROUP] of the lanes from `lane` on. Few rows have their dims in the lanes, in both passes.
INLINE void list_scores(const ringtile_call &c, const ListItem &item, const ListTile &tile, int vectors, int lane,
                        const ListScratch &to) {
    if (item.queries > 1 || c.heads / c.kv_heads > DECODE_QUERIES)
        return matmul<float, true>(vectors, tile.k.x, tile.k.step, to.lanes + lane * c.head_dim, GROUP<float>, to.scores,
                                   GROUP<float>, tile.count, c.head_dim, false);
    const int64_t width = whole_vectors(c.head_dim);
    decode_scores<float>({to.rows, width}, item.rows, tile.k, tile.count, width, to.decoded);
    for (int k = 0; k < tile.count; k++)
        for (int l = 0; l < item.end; l++)
            to.scores[k * GROUP<float> + l] = l < item.rows ? to.decoded[l * MAX_BLOCK + k] : 0;
}

// Add weights [key][GROUP] of the lanes from `lane` on, times rows of keys or values, to sums [row][width].
INLINE void add_rows(const ListItem &item, const ListTile &tile, int lane, const float *weights, Rows<float> rows,
                     int64_t width, float *sums) {
    const int64_t padded = whole_vectors(width);
    for (int64_t d = 0; d < padded; d += GROUP<float>)
        matmul<float, false>((int)min(NR, (padded - d) / Lanes<float>::count), weights, GROUP<float>, rows.x + d, rows.step,
                             sums + lane * padded + d, padded, min(GROUP<float>, item.rows - lane), tile.count, true);
}

INLINE void clear_rows(float *sums, const ListItem &item, int64_t width) {
    __builtin_memset(sums, 0, item.rows * whole_vectors(width) * sizeof(float));
}

INLINE void list_forward(const ringtile_call &c, const ListItem &item, const ListScratch &to) {
    constexpr int L = Lanes<float>::count;
    const KeyList list = item.list(c, 0, c.n_keys);
    const int64_t width = whole_vectors(c.value_dim);
    const float base = base_of<float>(c), scale = (float)size_of_scale(c);
    load_lanes(c, item, c.q, c.q_stride, c.head_dim, sign_of<float>(c), to.rows, to.lanes);
    clear_rows(to.sums, item, c.value_dim);
    Softmax<float> softmax(c, to.softmax);
    softmax.value_dim = 0;  // its sums are rows here
    softmax.clear(0, MAX_BLOCK);
    for (int64_t place = list.first; place < list.last; place += LIST_TILE) {
        const ListTile tile(c, item, list, place, to);
        const Mask mask = tile.mask();
        for (int lane = 0; lane < item.rows; lane += GROUP<float>) {
            const int vectors = (int)min(NR, (item.end - lane) / L), last = (int)min(lane + GROUP<float>, item.rows);
            float before[GROUP<float>], share[GROUP<float>];
            for (int i = 0; i < GROUP<float>; i++) before[i] = softmax.highest[lane + i];
            list_scores(c, item, tile, vectors, lane, to);
            VectorWeights<float>::weigh(vectors, to.scores, 0, tile.count, lane, base, mask, nullptr, softmax);
            for (int n = 0; n < vectors; n++)
                store(share + n * L, exp2<float>((load(before + n * L) - load(softmax.highest + lane + n * L)) * base));
            for (int row = lane; row < last; row++) {
                if (before[row - lane] == softmax.highest[row]) continue;
                for (int64_t d = 0; d < width; d += L)
                    store(to.sums + row * width + d, load(to.sums + row * width + d) * share[row - lane]);
            }
            add_rows(item, tile, lane, to.scores, tile.v, c.value_dim, to.sums);
        }
    }
    for (int i = 0; i < item.queries; i++) {
        float share[MAX_BLOCK];
        for (int h = 0; h < item.heads; h++) {
            const float highest = softmax.highest[i * item.heads + h], total = softmax.total[i * item.heads + h];
            share[h] = item.empty[i] ? 0 : 1 / total;
            ((float *)c.lse)[(item.b * c.heads + item.head + h) * c.n_queries + item.query + i] =
                item.empty[i] ? -infinity<float>() : highest * scale + exact_log(total);
        }
        write_rows(c, to.sums + i * item.heads * width, item.heads, c.value_dim, share,
                   row_at(c, c.out, c.out_stride, item.b, item.head, item.query + i), c.out_stride[1]);
    }
}

// The gradients of the queries of an item, and the weights and gradients of scores from which those of keys are made.
INLINE void list_query_grads(const ringtile_call &c, const ListItem &item, const ListScratch &to) {
    constexpr int L = Lanes<float>::count;
    const KeyList list = item.list(c, 0, c.n_keys);
    const int64_t width = whole_vectors(c.value_dim), key_width = whole_vectors(c.head_dim), ratio = c.heads / c.kv_heads;
    const float scale = (float)c.options.scale;
    load_lanes(c, item, c.q, c.q_stride, c.head_dim, 1, to.rows, to.lanes);
    load_lanes(c, item, c.backward.out_grad, c.backward.out_grad_stride, c.value_dim, 1, to.grad_rows, to.grad_lanes);
    load_rows(c, item, item.head, item.heads, c.out, c.out_stride, c.value_dim, to.sums);
    float lse[MAX_BLOCK], delta[MAX_BLOCK], ones[MAX_BLOCK];
    for (int row = 0; row < MAX_BLOCK; row++) {
        const int64_t at = (item.b * c.heads + item.head + row % item.heads) * c.n_queries + item.query + row / item.heads;
        lse[row] = infinity<float>(), delta[row] = 0, ones[row] = 1;
        if (row >= item.rows || item.empty[row / item.heads] || ((const float *)c.lse)[at] == -infinity<float>()) continue;
        lse[row] = ((const float *)c.lse)[at];
        // As matmul adds products: the gradient of a row's only score is then 0, to the last bit.
        for (int64_t d = 0; d < c.value_dim; d++)
            delta[row] = fused(to.sums[row * width + d], to.grad_rows[row * width + d], delta[row]);
        if (c.backward.lse_grad) delta[row] -= ((const float *)c.backward.lse_grad)[at];
    }
    clear_rows(to.sums, item, c.head_dim);
    for (int64_t place = list.first; place < list.last; place += LIST_TILE) {
        const ListTile tile(c, item, list, place, to);
        const Mask mask = tile.mask();
        for (int lane = 0; lane < item.rows; lane += GROUP<float>) {
            const int vectors = (int)min(NR, (item.end - lane) / L), rows = (int)min(GROUP<float>, item.rows - lane);
            list_scores(c, item, tile, vectors, lane, to);
            matmul<float, true>(vectors, tile.v.x, tile.v.step, to.grad_lanes + lane * c.value_dim, GROUP<float>, to.grads,
                                GROUP<float>, tile.count, c.value_dim, false);
            for (int k = 0; k < tile.count; k++) {
                float *score = to.scores + k * GROUP<float>, *grad = to.grads + k * GROUP<float>;
                for (int n = 0; n < vectors * L; n += L) {
                    Vec<float> p = exp2<float>(exponent_of<float>(load(score + n), scale, load(lse + lane + n)));
                    Vec<float> g = p * (load(grad + n) - load(delta + lane + n)) * scale;
                    if (mask.bits) {
                        const Ints<float> kept = lanes_of<float>(mask.bits + k, n);
                        p = kept ? p : Vec<float>{}, g = kept ? g : Vec<float>{};
                    }
                    store(score + n, p), store(grad + n, g);
                }
                const int64_t at = (place + k) * item.queries * ratio + item.skipped + lane;
                for (int i = 0; i < rows; i++) item.weights[at + i] = score[i], item.slopes[at + i] = grad[i];
            }
            add_rows(item, tile, lane, to.grads, tile.k, c.head_dim, to.sums);
        }
    }
    for (int i = 0; i < item.queries; i++) {
        const int64_t at = (item.b * c.heads + item.head) * c.n_queries + item.query + i;
        write_rows(c, to.sums + i * item.heads * key_width, item.heads, c.head_dim, ones,
                   (char *)c.backward.q_grad + at * c.head_dim * (c.dtype == RINGTILE_FLOAT32 ? 4 : 2),
                   c.n_queries * c.head_dim);
    }
}

// Add what an item left to the gradients of the keys from `low` to `high` - 1, which are float32.
INLINE void add_key_grads(const ringtile_call &c, const ListItem &item, int64_t low, int64_t high, const ListScratch &to) {
    const KeyList list = item.list(c, low, high);
    if (list.first == list.last) return;
    const int64_t head = item.b * c.kv_heads + item.kv, ratio = c.heads / c.kv_heads, depth = item.queries * ratio;
    auto add = [&](const ListKeys &tile, const float *weights, const float *rows, int64_t width, void *grads) {
        const int64_t padded = whole_vectors(width);
        for (int64_t d = 0; d < width; d += GROUP<float>) {
            matmul<float, true>((int)min(NR, (padded - d) / Lanes<float>::count), weights, depth, rows + d, padded, to.scores,
                                GROUP<float>, tile.count, depth, false);
            for (int k = 0; k < tile.count; k++) {
                float *grad = (float *)grads + (head * c.n_keys + tile.keys[k]) * width + d;
                for (int64_t i = 0; i < min(GROUP<float>, width - d) && tile.keys[k] >= 0; i++)
                    grad[i] += to.scores[k * GROUP<float> + i];
            }
        }
    };
    load_rows(c, item, item.kv * ratio, (int)ratio, c.q, c.q_stride, c.head_dim, to.rows);
    load_rows(c, item, item.kv * ratio, (int)ratio, c.backward.out_grad, c.backward.out_grad_stride, c.value_dim, to.grad_rows);
    for (int64_t place = list.first; place < list.last; place += LIST_TILE) {
        const ListKeys tile(c, item, list, place);
        add(tile, item.slopes + place * depth, to.rows, c.head_dim, c.backward.k_grad);
        add(tile, item.weights + place * depth, to.grad_rows, c.value_dim, c.backward.v_grad);
    }
}

// An item of a call, see ringtile.h.
inline void list_item(const ringtile_call &c, int64_t number, float *memory) {
    if (c.work.phase == RINGTILE_LISTS_UNIONS) return list_union(c, number, memory);
    const auto &lists = c.lists;
    const ListScratch to(c, memory);
    const int64_t runs = lists.last_run - lists.first_run;
    if (c.work.phase == RINGTILE_LISTS_KEY_GRADS) {
        const int64_t chunks = (c.n_keys + lists.chunk_keys - 1) / lists.chunk_keys, low = number % chunks * lists.chunk_keys;
        const int64_t head = number / chunks;
        for (int64_t run = lists.first_run; run < lists.last_run; run++)
            each_of_run(c, head / c.kv_heads, head % c.kv_heads, 0, run, [&](const ListItem &item) {
                add_key_grads(c, item, low, low + lists.chunk_keys, to);
            });
        return;
    }
    const int64_t parts = (c.heads / c.kv_heads + lists.list_rows - 1) / lists.list_rows, head = number / runs / parts;
    each_of_run(c, head / c.kv_heads, head % c.kv_heads, number / runs % parts, lists.first_run + number % runs,
                [&](const ListItem &item) {
                    if (c.work.phase == RINGTILE_LISTS_FORWARD) list_forward(c, item, to);
                    else list_query_grads(c, item, to);
                });
}

}  // namespace ISA
