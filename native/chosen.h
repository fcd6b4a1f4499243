// Attention over lists of keys. The heads that share a key head are in the lanes of vectors. The keys of a list are gathered
// into tiles, and widened to float32 on the way, so that one kernel serves all dtypes. Few heads would leave lanes idle: the
// queries of a run, whose lists agree enough, fill them together, over the union of their lists. If the lists disagree, dims
// are in the lanes, and keys are read in place. Then several runs go through the keys together, one segment after another,
// so that a key that many of them keep is in a cache.
#pragma once
#include "decode.h"
#include "softmax.h"

namespace ISA {

constexpr int LIST_TILE = 64, MAX_RUN = 16, KEY_ROWS = 256;
constexpr int64_t SEGMENT_NUMBERS = 1 << 17;  // of keys and values, which leave room for the rows in the second cache

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

    KeyList(const int32_t *entries, int shift, int64_t first) : entries(entries), shift(shift), first(first), last(first) {}
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
    int first_row;                        // in the scratch of all runs that are computed together
    bool direct;                          // dims are in the lanes
    const int32_t *entries;
    const uint16_t *bits;
    int64_t length, lowest, highest, next, low[MAX_RUN], high[MAX_RUN];  // next: the first place of the next segment
    bool empty[MAX_RUN];
    Ahead keys, values;  // of the next segment
    // Where the backward pass leaves the weights [place][row of all heads], and the gradients of scores.
    float *weights, *slopes;

    ListItem(const ringtile_call &c, int64_t b, int64_t kv, int64_t part, int64_t first_run, int64_t run, int one)
        : b(b), kv(kv), bits(), length(c.lists.list_length), lowest(c.n_keys), highest(0), next(), keys(), values() {
        const auto &lists = c.lists;
        const int64_t ratio = c.heads / c.kv_heads, group = kv * lists.list_groups / c.kv_heads;
        skipped = part * lists.list_rows, head = kv * ratio + skipped, heads = (int)min(lists.list_rows, ratio - skipped);
        query = run * lists.run + max(0, one);
        queries = one < 0 ? (int)min(lists.run, c.n_queries - query) : 1;
        rows = queries * heads;
        direct = queries == 1 && ratio <= DECODE_QUERIES;
        const int64_t own = ratio <= DECODE_QUERIES ? ratio : whole_vectors(heads);
        end = (int)(direct ? rows : whole_vectors(rows));
        first_row = (int)((run - first_run) * whole_vectors(lists.run * own) + max(0, one) * own);
        for (int i = 0; i < queries; i++) {
            const int32_t *limits = lists.limits + b * lists.limits_stride + 2 * (query + i);
            entries = lists.indices + b * lists.indices_stride + (group * c.n_queries + query + i) * length;
            low[i] = max(0, limits[0]), high[i] = min(limits[1], c.n_keys);
            const KeyList own(c, entries, length, low[i], high[i]);
            empty[i] = own.first == own.last;
            if (!empty[i]) lowest = min(lowest, low[i]), highest = max(highest, high[i]);
        }
        const int64_t number = b * c.kv_heads + kv, at = (b * lists.list_groups + group) * runs_of(c) + run;
        const int64_t runs = lists.last_run - lists.first_run;
        const int64_t before = ((number - lists.first_head) * runs + run - lists.first_run) * lists.weights_room;
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

    // The list of the next segment, which ends before key `to`. Its end is near.
    INLINE KeyList advance(const ringtile_call &c, int64_t to) {
        KeyList list(entries, __builtin_ctz((unsigned)c.block), next);
        const int64_t high = min(to, highest), near = 16;
        int64_t at = next >> list.shift;
        auto before = [&](int64_t i) { return entries[i] >= 0 && (int64_t)entries[i] << list.shift < high; };
        while (at + near < length && before(at + near)) at += near;
        at += bisect(min(near, length - at), [&](int64_t i) { return before(at + i); });
        // The last entry may end after `to`.
        if (at > 0) list.last = (at << list.shift) - max(0, ((int64_t)entries[at - 1] << list.shift) + c.block - high);
        next = list.last = max(list.first, list.last);
        return list;
    }
};

// Call f with the queries of runs: of each at once, or one after another if they have no union.
template <class F>
INLINE void each_of_runs(const ringtile_call &c, int64_t b, int64_t kv, int64_t part, int64_t first, int64_t last, F f) {
    const auto &lists = c.lists;
    for (int64_t run = first; run < last; run++) {
        const int64_t at = (b * lists.list_groups + kv * lists.list_groups / c.kv_heads) * runs_of(c) + run;
        const bool together = lists.run > 1 && lists.union_length[at] > 0;
        const int64_t count = together ? 1 : min(lists.run, c.n_queries - run * lists.run);
        for (int one = 0; one < count; one++) f(ListItem(c, b, kv, part, first, run, together ? -1 : one));
    }
}

// Copy rows of any dtype, in whole vectors: the rows [0, count) without `places`, and zeros for a place below 0.
template <class E>
void copy_rows(const void *x, int64_t step, const int32_t *places, int count, int64_t width, float *y) {
    constexpr int AHEAD = 4;
    const int64_t padded = whole_vectors(width);
    for (int i = 0; i < count; i++) {
        if (places) ahead_of(Rows<E>{(const E *)x, step}, max(0, places[min(i + AHEAD, count - 1)]), 1, width).fetch(0, 1);
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

// Write the union of the lists of a run. Its length is 0 if it would take longer than its lists.
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
    lists.union_length[number] = found <= lists.union_room && lists.union_cost * found <= listed ? found : 0;
}

// A row that keeps a key, and what it adds to the key's gradients.
struct KeptBy {
    int32_t key, row;
    float weight, slope;
};

// Runs whose sums of gradients are added up by themselves: those of one chain of sums over all queries would round more than
// PyTorch's. The rows of few heads stay in a cache meanwhile.
INLINE int64_t runs_of_sums(const ringtile_call &c) {
    const int64_t ratio = c.heads / c.kv_heads;
    return max(1, KEY_ROWS / (c.lists.run * (ratio <= DECODE_QUERIES ? ratio : 1)));
}

struct ListScratch {
    static constexpr int COUNT = 16;
    float *rows, *grad_rows, *lanes, *grad_lanes, *sums, *softmax;  // of all rows
    float *keys, *values, *scores, *grads, *few;                    // of a tile
    float *key_sums, *value_sums, *kept, *by_key, *begins;          // of a chunk of keys
    uint8_t *met;                                                   // its keys that have sums
    ListItem *items;                                                // that are computed together

    // The number of floats before a field.
    static int64_t before(const ringtile_call &c, int field) {
        const int64_t d = whole_vectors(c.head_dim), dv = whole_vectors(c.value_dim), ratio = c.heads / c.kv_heads;
        const int64_t chunk = c.work.phase == RINGTILE_LISTS_KEY_GRADS ? c.lists.chunk_keys : 0;
        const int64_t few = chunk && ratio <= DECODE_QUERIES ? runs_of_sums(c) * c.lists.run * ratio : 0;
        const int64_t all = max(few, max(ratio, MAX_BLOCK));
        const int64_t tile = LIST_TILE * GROUP<float>;
        const int64_t counts[COUNT] = {all * d, all * dv, MAX_BLOCK * d, MAX_BLOCK * dv, MAX_BLOCK * max(d, dv), 2 * MAX_BLOCK,
                                       LIST_TILE * d, LIST_TILE * dv, tile, tile, 2 * DECODE_QUERIES * MAX_BLOCK, chunk * d,
                                       chunk * dv, few * chunk * (int64_t)sizeof(KeptBy) / 4,
                                       few * chunk * (int64_t)sizeof(KeptBy) / 4, 2 * (chunk / 2 + 1)};
        int64_t sum = 0;
        for (int i = 0; i < field; i++) sum += counts[i];
        return sum;
    }
    static int64_t size(const ringtile_call &c) {
        if (c.work.phase == RINGTILE_LISTS_UNIONS) return c.n_keys / c.block / 2 + 1;
        return before(c, COUNT) + c.lists.chunk_keys / 4 + 2 + MAX_BLOCK * sizeof(ListItem) / 4;
    }

    ListScratch(const ringtile_call &c, float *x)
        : met((uint8_t *)(x + before(c, COUNT))), items((ListItem *)(x + before(c, COUNT) + (c.lists.chunk_keys / 8 + 1) * 2)) {
        float **places[COUNT] = {&rows, &grad_rows, &lanes, &grad_lanes, &sums, &softmax, &keys, &values, &scores, &grads, &few,
                                 &key_sums, &value_sums, &kept, &by_key, &begins};
        for (int i = 0; i < COUNT; i++) *places[i] = x + before(c, i);
    }

    // The scratch of an item.
    ListScratch(const ringtile_call &c, const ListItem &item, const ListScratch &all) : ListScratch(all) {
        const int64_t d = whole_vectors(c.head_dim), dv = whole_vectors(c.value_dim);
        rows += item.first_row * d, grad_rows += item.first_row * dv, lanes += item.first_row * d;
        grad_lanes += item.first_row * dv, sums += item.first_row * max(d, dv), softmax += item.first_row;
    }
};

// The keys of a tile of places, -1 for one that no query keeps, and the rows that keep them if not all do.
struct ListKeys {
    int count;
    bool partial, skips;
    int32_t keys[LIST_TILE], rows[LIST_TILE];

    INLINE ListKeys(const ringtile_call &c, const ListItem &item, const KeyList &list, int64_t place)
        : count((int)min(LIST_TILE, list.last - place)), partial(false), skips(false) {
        const uint32_t all = (1u << item.queries) - 1;
        for (int k = 0; k < count; k++) {
            const int64_t at = place + k, entry = item.entries[list.shift ? at >> list.shift : at];
            // No list, sorted or not, leads out of a tensor.
            keys[k] = (int32_t)min(max(list.shift ? (entry << list.shift) + (at & (c.block - 1)) : entry, 0), c.n_keys - 1);
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
            skips |= !kept;
            keys[k] = kept ? keys[k] : -1;
        }
    }

    INLINE Mask mask() const { return {partial ? rows : nullptr, 1, nullptr}; }
};

// Rows one after another, or those of the places.
struct Gathered {
    const float *x;
    int64_t step;
    const int32_t *places;

    INLINE const float *row(int64_t i) const { return x + (places ? places[i] : i) * step; }
};

// matmul of rows in any place: of A, then the next ones and `ahead` are asked for, or of B. C has N vectors.
template <int N, bool A_ROWS>
void gathered_matmul(const float *a, int64_t a_step, const float *b, int64_t b_k, const int32_t *places, float *c, int64_t c_m,
                     int64_t rows, int64_t depth, bool add, Gathered ahead, int64_t width) {
    for (int64_t row = 0; row < rows; row += MR) {
        for (int64_t i = row; A_ROWS && i < min(row + MR, rows); i++)
            for (int64_t d = 0; d < width; d += 16) __builtin_prefetch(ahead.row(i) + d, 0, 2);
        for (int64_t i = row + MR; A_ROWS && i < min(row + 2 * MR, rows); i++)
            for (int64_t d = 0; d < depth; d += 16) __builtin_prefetch(a + places[i] * a_step + d, 0, 2);
        auto tile = [&](auto m) INLINE_LAMBDA {
            register_tile<float, decltype(m)::value, N, A_ROWS, true>(A_ROWS ? a : a + row, a_step, b, b_k, c + row * c_m, c_m,
                                                                      depth, add, A_ROWS ? places + row : places);
        };
        if (rows - row >= MR) tile(Constant<MR>{});
        else with_constant<MR - 1>(rows - row, tile);
    }
}

// A tile of keys and values. Those of float32 are read in place if they follow one another, if their dims are in lanes, and
// if there are as many rows as a run has at most.
struct ListTile : ListKeys {
    Gathered k, v;

    ListTile(const ringtile_call &c, const ListItem &item, const KeyList &list, int64_t place, const ListScratch &to)
        : ListKeys(c, item, list, place) {
        bool follow = true;
        for (int i = 0; i < count; i++) follow &= keys[i] == keys[0] + i;
        auto gather = [&](const void *x, const int64_t *stride, int64_t width, float *copy) {
            const void *head = row_at(c, x, stride, item.b, item.kv, 0);
            const int64_t padded = whole_vectors(width);
            const bool in_place = c.dtype == RINGTILE_FLOAT32 && padded == width;
            if (in_place && follow) return Gathered{(const float *)head + keys[0] * stride[2], stride[2], nullptr};
            if (in_place && (item.direct || (item.end == MAX_RUN && width % GROUP<float> == 0 && !skips)))
                return Gathered{(const float *)head, stride[2], keys};
            copy_rows(c, head, stride[2], keys, count, width, copy);
            return Gathered{copy, padded, nullptr};
        };
        Packing packing(c);
        k = gather(c.k, c.k_stride, c.head_dim, to.keys);
        // The values of latent attention are the first dims of its keys.
        const bool same = c.v == c.k && c.v_stride[0] == c.k_stride[0] && c.v_stride[1] == c.k_stride[1] &&
                          c.v_stride[2] == c.k_stride[2] && c.value_dim <= c.head_dim;
        v = same ? k : gather(c.v, c.v_stride, c.value_dim, to.values);
    }
};

// Copy the rows of an item, zeros for a query that keeps no key: in a union, others' sums would meet its NaN. In the backward
// pass, also zeros for a row without a score above -inf.
inline void load_rows(const ringtile_call &c, const ListItem &item, int64_t head, int heads, const void *x, const int64_t *stride,
                      int64_t width, float *y) {
    const int64_t count = heads * whole_vectors(width);
    for (int i = 0; i < item.queries; i++) {
        if (item.empty[i]) __builtin_memset(y + i * count, 0, count * sizeof(float));
        else copy_rows(c, row_at(c, x, stride, item.b, head, item.query + i), stride[1], nullptr, heads, width, y + i * count);
        for (int h = 0; c.work.phase != RINGTILE_LISTS_FORWARD && h < heads; h++)
            if (((const float *)c.lse)[(item.b * c.heads + head + h) * c.n_queries + item.query + i] == -infinity<float>())
                __builtin_memset(y + i * count + h * whole_vectors(width), 0, whole_vectors(width) * sizeof(float));
    }
}

// The lanes of a group. One vector leaves none between the vectors of its dims, which would use a part of a cache's sets.
INLINE int64_t lane_step(const ListItem &item) { return min(GROUP<float>, item.end); }

// The same, and in lanes if they are not for dims, times a sign.
INLINE void load_lanes(const ringtile_call &c, const ListItem &item, const void *x, const int64_t *stride, int64_t width,
                       float sign, float *rows, float *lanes) {
    Packing packing(c);
    const int64_t padded = whole_vectors(width);
    load_rows(c, item, item.head, item.heads, x, stride, width, rows);
    for (int64_t i = 0; i < item.rows * padded && sign != 1; i++) rows[i] = sign == 0 ? 0 : sign * rows[i];
    if (!item.direct)
        transpose_in(Rows<float>{rows, padded}, 0, item.rows, 0, item.end, width, 1.0f, lanes, lane_step(item));
}

// Scores [key][GROUP] of the lanes from `lane` on.
INLINE void list_scores(const ListItem &item, const ListTile &tile, const Gathered &keys, int64_t width, int vectors, int lane,
                        const float *lanes, float *scores, Gathered ahead, int64_t ahead_width) {
    if (keys.places)
        return gathered_matmul<MAX_RUN / Lanes<float>::count, true>(keys.x, keys.step, lanes, MAX_RUN, keys.places, scores,
                                                                    GROUP<float>, tile.count, width, false, ahead, ahead_width);
    matmul<float, true>(vectors, keys.x, keys.step, lanes + lane * width, lane_step(item), scores, GROUP<float>, tile.count,
                        width, false);
}

// Add weights [key][GROUP] of the lanes from `lane` on, times rows of keys or values, to sums [row][width].
INLINE void add_rows(const ListItem &item, const ListTile &tile, int lane, const float *weights, const Gathered &rows,
                     int64_t width, float *sums) {
    const int64_t padded = whole_vectors(width);
    for (int64_t d = 0; d < padded; d += GROUP<float>) {
        if (rows.places)
            gathered_matmul<NR, false>(weights, GROUP<float>, rows.x + d, rows.step, rows.places, sums + d, padded, item.rows,
                                       tile.count, true, rows, 0);
        else
            matmul<float, false>((int)min(NR, (padded - d) / Lanes<float>::count), weights, GROUP<float>, rows.x + d, rows.step,
                                 sums + lane * padded + d, padded, min(GROUP<float>, item.rows - lane), tile.count, true);
    }
}

// Add rows, times their weights, to sums in whole vectors, N of which stay in registers meanwhile.
template <int N, class W, class R>
INLINE void add_vectors(int count, W weight, R row, int64_t d, float *sums) {
    constexpr int L = Lanes<float>::count;
    Vec<float> sum[N] = {};
    for (int i = 0; i < count; i++) {
        const float *x = row(i) + d, w = weight(i);
        for (int n = 0; n < N; n++) sum[n] += w * load(x + n * L);
    }
    for (int n = 0; n < N; n++) store(sums + d + n * L, load(sums + d + n * L) + sum[n]);
}
template <class W, class R>
INLINE void add_weighted(int count, W weight, R row, int64_t width, float *sums) {
    constexpr int L = Lanes<float>::count;
    int64_t d = 0;
    for (; width - d >= 8 * L; d += 8 * L) add_vectors<8>(count, weight, row, d, sums);
    for (; width - d >= 4 * L; d += 4 * L) add_vectors<4>(count, weight, row, d, sums);
    for (; d < width; d += L) add_vectors<1>(count, weight, row, d, sums);
}

// add_rows with weights [row][MAX_BLOCK] and rows in any place.
inline void add_direct(const ListItem &item, const ListTile &tile, const float *weights, const Gathered &rows, int64_t width,
                       float *sums) {
    const int64_t padded = whole_vectors(width);
    for (int r = 0; r < item.rows; r++, weights += MAX_BLOCK, sums += padded)
        add_weighted(
            tile.count, [&](int k) INLINE_LAMBDA { return weights[k]; },
            [&](int k) INLINE_LAMBDA { return rows.row(k); }, padded, sums);
}

INLINE void clear_rows(float *sums, const ListItem &item, int64_t width) {
    __builtin_memset(sums, 0, item.rows * whole_vectors(width) * sizeof(float));
}

INLINE void begin_forward(const ringtile_call &c, const ListItem &item, const ListScratch &to) {
    load_lanes(c, item, c.q, c.q_stride, c.head_dim, sign_of<float>(c), to.rows, to.lanes);
    clear_rows(to.sums, item, c.value_dim);
    for (int row = 0; row < item.end; row++) to.softmax[row] = -infinity<float>(), to.softmax[MAX_BLOCK + row] = 0;
}

INLINE void forward_tile(const ringtile_call &c, const ListItem &item, const ListTile &tile, const ListScratch &to) {
    constexpr int L = Lanes<float>::count;
    const int64_t width = whole_vectors(c.value_dim), key_width = whole_vectors(c.head_dim);
    const float base = base_of<float>(c);
    Softmax<float> softmax(c, to.softmax);
    softmax.value_dim = 0;  // its sums are rows here
    if (item.direct) {
        item.keys.fetch(0, item.keys.rows);
        decode_scores<float>({to.rows, key_width}, item.rows, tile.k, tile.count, key_width, to.few);
        item.values.fetch(0, item.values.rows);
        decode_softmax_step(to.few, item.rows, tile.count, base, false, softmax.highest, softmax.total, to.sums, width);
        return add_direct(item, tile, to.few, tile.v, c.value_dim, to.sums);
    }
    const Mask mask = tile.mask();
    for (int lane = 0; lane < item.rows; lane += GROUP<float>) {
        const int vectors = (int)min(NR, (item.end - lane) / L), last = (int)min(lane + GROUP<float>, item.rows);
        float before[GROUP<float>], share[GROUP<float>];
        for (int i = 0; i < vectors * L; i++) before[i] = softmax.highest[lane + i];
        list_scores(item, tile, tile.k, c.head_dim, vectors, lane, to.lanes, to.scores, tile.v, c.value_dim);
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

INLINE void end_forward(const ringtile_call &c, const ListItem &item, const ListScratch &to) {
    const int64_t width = whole_vectors(c.value_dim);
    const float scale = (float)size_of_scale(c);
    for (int i = 0; i < item.queries; i++) {
        float share[MAX_BLOCK];
        for (int h = 0; h < item.heads; h++) {
            const float highest = to.softmax[i * item.heads + h], total = to.softmax[MAX_BLOCK + i * item.heads + h];
            // No key is kept, or all scores are -inf.
            const float lse = highest * scale + exact_log(total);
            ((float *)c.lse)[(item.b * c.heads + item.head + h) * c.n_queries + item.query + i] = lse;
            share[h] = lse == -infinity<float>() ? 0 : 1 / total;
        }
        write_rows(c, to.sums + i * item.heads * width, item.heads, c.value_dim, share,
                   row_at(c, c.out, c.out_stride, item.b, item.head, item.query + i), c.out_stride[1]);
    }
}

// The gradients of the queries of an item, and the weights and gradients of scores from which those of keys are made.
INLINE void begin_query_grads(const ringtile_call &c, const ListItem &item, const ListScratch &to) {
    const int64_t width = whole_vectors(c.value_dim);
    load_lanes(c, item, c.q, c.q_stride, c.head_dim, 1, to.rows, to.lanes);
    load_lanes(c, item, c.backward.out_grad, c.backward.out_grad_stride, c.value_dim, 1, to.grad_rows, to.grad_lanes);
    load_rows(c, item, item.head, item.heads, c.out, c.out_stride, c.value_dim, to.sums);
    float *lse = to.softmax, *delta = to.softmax + MAX_BLOCK;
    for (int row = 0; row < item.end; row++) {
        lse[row] = infinity<float>(), delta[row] = 0;
        if (row >= item.rows || item.empty[row / item.heads]) continue;
        const int64_t at = (item.b * c.heads + item.head + row % item.heads) * c.n_queries + item.query + row / item.heads;
        if (((const float *)c.lse)[at] == -infinity<float>()) continue;
        lse[row] = ((const float *)c.lse)[at];
        // As products with values are added: the gradient of a row's only score is then 0, to the last bit.
        const float *out = to.sums + row * width, *grad = to.grad_rows + row * width;
        if (item.direct) {
            decode_scores<float>({grad, width}, 1, Gathered{out, width, nullptr}, 1, width, to.few);
            delta[row] = to.few[0];
        }
        for (int64_t d = 0; d < c.value_dim && !item.direct; d++) delta[row] = fused(out[d], grad[d], delta[row]);
        if (c.backward.lse_grad) delta[row] -= ((const float *)c.backward.lse_grad)[at];
    }
    clear_rows(to.sums, item, c.head_dim);
}

INLINE void query_grads_tile(const ringtile_call &c, const ListItem &item, const ListTile &tile, int64_t place,
                             const ListScratch &to) {
    constexpr int L = Lanes<float>::count;
    const int64_t width = whole_vectors(c.value_dim), key_width = whole_vectors(c.head_dim), ratio = c.heads / c.kv_heads;
    const float scale = (float)c.options.scale, *lse = to.softmax, *delta = to.softmax + MAX_BLOCK;
    if (item.direct) {
        float *slopes = to.few + DECODE_QUERIES * MAX_BLOCK;
        item.keys.fetch(0, item.keys.rows);
        decode_scores<float>({to.rows, key_width}, item.rows, tile.k, tile.count, key_width, to.few);
        item.values.fetch(0, item.values.rows);
        decode_scores<float>({to.grad_rows, width}, item.rows, tile.v, tile.count, width, slopes);
        for (int r = 0; r < item.rows; r++)
            for (int k = 0; k < tile.count; k += L) {
                float *weight = to.few + r * MAX_BLOCK + k, *slope = slopes + r * MAX_BLOCK + k;
                const Vec<float> p = exp2<float>(exponent_of<float>(load(weight), scale, splat(lse[r])));
                const Vec<float> g = p * (load(slope) - delta[r]) * scale;
                const bool lone = lse[r] == infinity<float>();
                store(weight, lone ? Vec<float>{} : p), store(slope, lone ? Vec<float>{} : g);
                for (int i = 0; i < min(L, tile.count - k); i++) {
                    item.weights[(place + k + i) * ratio + r] = weight[i];
                    item.slopes[(place + k + i) * ratio + r] = slope[i];
                }
            }
        return add_direct(item, tile, slopes, tile.k, c.head_dim, to.sums);
    }
    const Mask mask = tile.mask();
    for (int lane = 0; lane < item.rows; lane += GROUP<float>) {
        const int vectors = (int)min(NR, (item.end - lane) / L), rows = (int)min(GROUP<float>, item.rows - lane);
        list_scores(item, tile, tile.k, c.head_dim, vectors, lane, to.lanes, to.scores, tile.v, c.value_dim);
        list_scores(item, tile, tile.v, c.value_dim, vectors, lane, to.grad_lanes, to.grads, tile.v, 0);
        bool lone = false;
        for (int i = 0; i < rows; i++) lone |= lse[lane + i] == infinity<float>();
        for (int k = 0; k < tile.count; k++) {
            float *score = to.scores + k * GROUP<float>, *grad = to.grads + k * GROUP<float>;
            const int64_t at = (place + k) * item.queries * ratio + item.skipped + lane;
            for (int n = 0; n < vectors * L; n += L) {
                Vec<float> p = exp2<float>(exponent_of<float>(load(score + n), scale, load(lse + lane + n)));
                Vec<float> g = p * (load(grad + n) - load(delta + lane + n)) * scale;
                if (mask.bits || lone) {
                    const Ints<float> kept = (mask.bits ? lanes_of<float>(mask.bits + k, n) : ~Ints<float>{}) &
                                             (load(lse + lane + n) != infinity<float>());
                    p = kept ? p : Vec<float>{}, g = kept ? g : Vec<float>{};
                }
                store(score + n, p), store(grad + n, g);
                if (n + L <= rows) store(item.weights + at + n, p), store(item.slopes + at + n, g);
                for (int i = n; i < rows && n + L > rows; i++) item.weights[at + i] = score[i], item.slopes[at + i] = grad[i];
            }
        }
        add_rows(item, tile, lane, to.grads, tile.k, c.head_dim, to.sums);
    }
}

INLINE void end_query_grads(const ringtile_call &c, const ListItem &item, const ListScratch &to) {
    for (int i = 0; i < item.queries; i++) {
        float share[MAX_BLOCK];
        for (int h = 0; h < item.heads; h++) share[h] = to.softmax[i * item.heads + h] != infinity<float>();
        const int64_t at = (item.b * c.heads + item.head) * c.n_queries + item.query + i;
        write_rows(c, to.sums + i * item.heads * whole_vectors(c.head_dim), item.heads, c.head_dim, share,
                   (char *)c.backward.q_grad + at * c.head_dim * (c.dtype == RINGTILE_FLOAT32 ? 4 : 2),
                   c.n_queries * c.head_dim);
    }
}

// Some heads of runs [first, last), which go through the keys together.
inline void list_queries(const ringtile_call &c, int64_t head, int64_t part, int64_t first, int64_t last, const ListScratch &all) {
    const int64_t numbers = whole_vectors(c.head_dim) + whole_vectors(c.value_dim);
    const bool forward = c.work.phase == RINGTILE_LISTS_FORWARD;
    int64_t lowest = c.n_keys, highest = 0, places = 0, segment = c.n_keys, count = 0;
    each_of_runs(c, head / c.kv_heads, head % c.kv_heads, part, first, last, [&](const ListItem &item) {
        const ListScratch to(c, item, all);
        forward ? begin_forward(c, item, to) : begin_query_grads(c, item, to);
        lowest = min(lowest, item.lowest), highest = max(highest, item.highest);
        const KeyList list = item.list(c, 0, c.n_keys);
        places = item.direct ? places + list.last - list.first : max(places, list.last - list.first);
        all.items[count] = item, all.items[count++].next = list.first;
    });
    // The keys that fill a cache. One item needs none of them twice.
    if (c.lists.run > 1 && highest > lowest)
        segment = max(LIST_TILE, SEGMENT_NUMBERS / numbers * (highest - lowest) / max(1, min(places, highest - lowest)));
    // Meanwhile the next ones arrive, if most of them are needed.
    const int64_t step = places >= highest - lowest ? (segment + count - 1) / count : 0, size = c.dtype ? 2 : 4;
    for (int64_t low = lowest; low < highest; low += segment)
        for (ListItem *item = all.items; item < all.items + count; item++) {
            const ListScratch to(c, *item, all);
            const KeyList list = item->advance(c, low + segment);
            const ListItem &later = item + 1 < all.items + count ? item[1] : *all.items;
            for (int i = 0; i < LIST_TILE; i += 16) __builtin_prefetch(later.entries + (later.next >> list.shift) + i);
            const int64_t from = low + segment + (item - all.items) * step, rows = min(step, highest - from);
            item->keys = {row_at(c, c.k, c.k_stride, item->b, item->kv, from), c.k_stride[2] * size, c.head_dim * size, rows};
            item->values = {row_at(c, c.v, c.v_stride, item->b, item->kv, from), c.v_stride[2] * size, c.value_dim * size, rows};
            for (int64_t place = list.first; place < list.last; place += LIST_TILE) {
                const ListTile tile(c, *item, list, place, to);
                forward ? forward_tile(c, *item, tile, to) : query_grads_tile(c, *item, tile, place, to);
            }
        }
    for (const ListItem *item = all.items; item < all.items + count; item++) {
        const ListScratch to(c, *item, all);
        forward ? end_forward(c, *item, to) : end_query_grads(c, *item, to);
    }
}

// Add what an item left to the sums of the keys from `low` to `high` - 1.
inline void add_key_grads(const ringtile_call &c, const ListItem &item, const KeyList &list, int64_t low, int64_t high,
                          const ListScratch &to) {
    constexpr int L = Lanes<float>::count;
    const int64_t ratio = c.heads / c.kv_heads, depth = item.queries * ratio;
    auto add = [&](const ListKeys &tile, const float *weights, const float *rows, int64_t width, float *sums) {
        const int64_t padded = whole_vectors(width);
        for (int64_t d = 0; d < padded; d += GROUP<float>) {
            const int vectors = (int)min(NR, (padded - d) / L);
            matmul<float, true>(vectors, weights, depth, rows + d, padded, to.scores, GROUP<float>, tile.count, depth, false);
            for (int k = 0; k < tile.count; k++) {
                if (tile.keys[k] < low || tile.keys[k] >= high) continue;
                float *sum = sums + (tile.keys[k] - low) * padded + d;
                const bool met = to.met[tile.keys[k] - low];
                for (int n = 0; n < vectors * L; n += L) {
                    const Vec<float> product = load(to.scores + k * GROUP<float> + n);
                    store(sum + n, met ? load(sum + n) + product : product);
                }
            }
        }
    };
    for (int64_t place = list.first; place < list.last; place += LIST_TILE) {
        const ListKeys tile(c, item, list, place);
        add(tile, item.slopes + place * depth, to.rows, c.head_dim, to.key_sums);
        add(tile, item.weights + place * depth, to.grad_rows, c.value_dim, to.value_sums);
        for (int k = 0; k < tile.count; k++)
            if (tile.keys[k] >= low && tile.keys[k] < high) to.met[tile.keys[k] - low] = 1;
    }
}

// Add the sums of a chunk of keys over runs [first, last) to the gradients, which are float32.
inline void key_grads(const ringtile_call &c, int64_t head, int64_t low, int64_t high, int64_t first, int64_t last,
                      const ListScratch &to) {
    const int64_t ratio = c.heads / c.kv_heads, keys = high - low;
    const int64_t width = whole_vectors(c.head_dim), value_width = whole_vectors(c.value_dim);
    KeptBy *kept = (KeptBy *)to.kept, *by_key = (KeptBy *)to.by_key;
    int32_t *begins = (int32_t *)to.begins, count = 0;
    __builtin_memset(to.met, 0, keys);
    each_of_runs(c, head / c.kv_heads, head % c.kv_heads, 0, first, last, [&](const ListItem &item) {
        const KeyList list = item.list(c, low, high);
        if (list.first == list.last) return;
        ListScratch own = to;
        const int64_t row = ratio <= DECODE_QUERIES ? (item.query - first * c.lists.run) * ratio : 0;
        own.rows += row * width, own.grad_rows += row * value_width;
        load_rows(c, item, item.kv * ratio, (int)ratio, c.q, c.q_stride, c.head_dim, own.rows);
        load_rows(c, item, item.kv * ratio, (int)ratio, c.backward.out_grad, c.backward.out_grad_stride, c.value_dim,
                  own.grad_rows);
        if (item.bits || ratio > DECODE_QUERIES) return add_key_grads(c, item, list, low, high, own);
        // A list that is not sorted can have more keys here, and other ones.
        for (int64_t place = list.first; place < min(list.last, list.first + keys); place++) {
            const int64_t key = ((int64_t)item.entries[place >> list.shift] << list.shift) + (place & (c.block - 1)) - low;
            if (key < 0 || key >= keys) continue;
            for (int64_t r = 0, at = place * ratio; r < ratio; r++, at++)
                kept[count++] = {(int32_t)key, (int32_t)(row + r), item.weights[at], item.slopes[at]};
        }
    });
    if (count) {
        // The rows of a key follow one another, so that its sums stay in registers.
        __builtin_memset(begins, 0, (keys + 1) * sizeof(int32_t));
        for (int i = 0; i < count; i++) begins[kept[i].key + 1]++;
        for (int64_t key = 0; key < keys; key++) begins[key + 1] += begins[key];
        for (int i = 0; i < count; i++) by_key[begins[kept[i].key]++] = kept[i];
        for (int64_t key = 0, begin = 0; key < keys; begin = begins[key++]) {
            const int rows = (int)(begins[key] - begin);
            if (!rows) continue;
            auto add_rows_of = [&](float KeptBy::*weight, const float *x, int64_t width, float *sums) {
                const KeptBy *of_key = by_key + begin;
                if (!to.met[key]) __builtin_memset(sums, 0, width * sizeof(float));
                add_weighted(
                    rows, [&](int i) INLINE_LAMBDA { return of_key[i].*weight; },
                    [&](int i) INLINE_LAMBDA { return x + of_key[i].row * width; }, width, sums);
            };
            add_rows_of(&KeptBy::slope, to.rows, width, to.key_sums + key * width);
            add_rows_of(&KeptBy::weight, to.grad_rows, value_width, to.value_sums + key * value_width);
            to.met[key] = 1;
        }
    }
    auto add = [&](const float *sums, int64_t width, float *grads) {
        for (int64_t key = low; key < high; key++) {
            if (!to.met[key - low]) continue;
            const float *sum = sums + (key - low) * whole_vectors(width);
            float *grad = grads + (head * c.n_keys + key) * width;
            for (int64_t d = 0; d < width; d++) grad[d] += sum[d];
        }
    };
    add(to.key_sums, c.head_dim, c.lists.key_sums);
    add(to.value_sums, c.value_dim, c.lists.value_sums);
}

// An item of a call, see ringtile.h.
inline void list_item(const ringtile_call &c, int64_t number, float *memory) {
    if (c.work.phase == RINGTILE_LISTS_UNIONS) return list_union(c, number, memory);
    const auto &lists = c.lists;
    const ListScratch to(c, memory);
    if (c.work.phase == RINGTILE_LISTS_KEY_GRADS) {
        const int64_t chunks = (c.n_keys + lists.chunk_keys - 1) / lists.chunk_keys, low = number % chunks * lists.chunk_keys;
        const int64_t step = runs_of_sums(c), high = min(low + lists.chunk_keys, c.n_keys);
        for (int64_t first = lists.first_run; first < lists.last_run; first += step)
            key_grads(c, lists.first_head + number / chunks, low, high, first, min(first + step, lists.last_run), to);
        return;
    }
    const int64_t parts = (c.heads / c.kv_heads + lists.list_rows - 1) / lists.list_rows;
    const int64_t steps = (lists.last_run - lists.first_run + lists.item_runs - 1) / lists.item_runs;
    const int64_t first = lists.first_run + number % steps * lists.item_runs;
    list_queries(c, lists.first_head + number / steps / parts, number / steps % parts, first,
                 min(first + lists.item_runs, lists.last_run), to);
}

}  // namespace ISA
