// Attention over lists of keys, query by query. The heads that share a key head are in the lanes of vectors. The keys of a
// list are gathered into tiles, and widened to float32 on the way, so that one kernel serves all dtypes.
#pragma once
#include "decode.h"
#include "softmax.h"

namespace ISA {

constexpr int LIST_TILE = 64;

INLINE int64_t whole_vectors(int64_t dims) {
    constexpr int L = Lanes<float>::count;
    return (dims + L - 1) / L * L;
}

// The places [first, last) in the list of a query whose keys it keeps: a place for each token of each entry.
struct KeyList {
    const int32_t *entries;
    int shift;
    int64_t first, last, n_keys;

    // Of the keys from `low` to `high` - 1.
    KeyList(const ringtile_call &c, int64_t b, int64_t kv, int64_t query, int64_t low, int64_t high)
        : shift(__builtin_ctz((unsigned)c.block)), n_keys(c.n_keys) {
        const auto &lists = c.lists;
        const int64_t slot = kv * lists.list_groups / c.kv_heads * c.n_queries + query, block = c.block;
        entries = lists.indices + b * lists.indices_stride + slot * lists.list_length;
        const int32_t *limits = lists.limits + b * lists.limits_stride + 2 * query;
        low = max(low, limits[0]), high = min(min(high, limits[1]), n_keys);
        auto begins = [&](int64_t i) { return entries[i] * block; };
        const int64_t from = bisect(lists.list_length, [&](int64_t i) { return entries[i] >= 0 && begins(i) + block <= low; });
        const int64_t to = bisect(lists.list_length, [&](int64_t i) { return entries[i] >= 0 && begins(i) < high; });
        first = last = 0;
        if (from >= to) return;
        first = from * block + max(0, low - begins(from));
        last = max(first, to * block - max(0, begins(to - 1) + block - high));
    }

    // The keys of `count` places. No list, sorted or not, leads out of a tensor.
    INLINE void keys(int64_t place, int count, int32_t *to) const {
        for (int i = 0; i < count; i++, place++) {
            const int64_t key = ((int64_t)entries[place >> shift] << shift) + (place & ((1 << shift) - 1));
            to[i] = (int32_t)min(max(key, 0), n_keys - 1);
        }
    }
};

// Copy rows of any dtype, in whole vectors, the rows [0, count) without `places`.
template <class E>
void copy_rows(const void *x, int64_t step, const int32_t *places, int count, int64_t width, float *y) {
    const int64_t padded = whole_vectors(width);
    for (int i = 0; i < count; i++) {
        const E *row = (const E *)x + (places ? places[i] : i) * step;
        copy_in<E, float>({row, 0}, 1, width, padded, nullptr, y + i * padded);
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

// A query, and up to list_rows of the heads that share a key head.
struct ListItem {
    int64_t b, kv, head, query;
    int rows, end;  // end: in whole vectors

    ListItem(const ringtile_call &c, int64_t item) {
        const int64_t window = c.lists.last_query - c.lists.first_query, ratio = c.heads / c.kv_heads;
        const int64_t parts = (ratio + c.lists.list_rows - 1) / c.lists.list_rows, part = item / window % parts;
        query = c.lists.first_query + item % window;
        b = item / window / parts / c.kv_heads, kv = item / window / parts % c.kv_heads;
        head = kv * ratio + part * c.lists.list_rows;
        rows = (int)min(c.lists.list_rows, ratio - part * c.lists.list_rows), end = (int)whole_vectors(rows);
    }
};

struct ListScratch {
    float *rows, *grad_rows, *lanes, *grad_lanes, *keys, *values, *scores, *grads, *sums, *softmax, *decoded;

    static int64_t size(const ringtile_call &c) {
        const int64_t d = whole_vectors(c.head_dim), dv = whole_vectors(c.value_dim);
        return (c.heads / c.kv_heads + MAX_BLOCK + LIST_TILE) * (d + dv) + MAX_BLOCK * max(d, dv) + 2 * LIST_TILE * GROUP<float> +
               (2 + DECODE_QUERIES) * MAX_BLOCK;
    }

    ListScratch(const ringtile_call &c, float *x) {
        const int64_t d = whole_vectors(c.head_dim), dv = whole_vectors(c.value_dim), all = c.heads / c.kv_heads;
        float **places[] = {&rows, &grad_rows, &lanes, &grad_lanes, &keys, &values, &sums, &scores, &grads, &softmax, &decoded};
        const int64_t counts[] = {all, all, MAX_BLOCK, MAX_BLOCK, LIST_TILE, LIST_TILE, MAX_BLOCK, LIST_TILE, LIST_TILE, 2, 0};
        const int64_t widths[] = {d, dv, d, dv, d, dv, max(d, dv), GROUP<float>, GROUP<float>, MAX_BLOCK, 0};
        for (int i = 0; i < 11; i++) *places[i] = x, x += counts[i] * widths[i];
    }
};

// A tile of gathered keys and values. Those of float32 that follow one another are read in place.
struct ListTile {
    int count;
    int32_t places[LIST_TILE];
    Rows<float> keys, values;

    ListTile(const ringtile_call &c, const ListItem &item, const KeyList &list, int64_t place, const ListScratch &to)
        : count((int)min(LIST_TILE, list.last - place)) {
        list.keys(place, count, places);
        auto gather = [&](const void *x, const int64_t *stride, int64_t width, float *copy) {
            const void *head = row_at(c, x, stride, item.b, item.kv, 0);
            const int64_t padded = whole_vectors(width);
            if (c.dtype == RINGTILE_FLOAT32 && padded == width && places[count - 1] - places[0] == count - 1)
                return Rows<float>{(const float *)head + places[0] * stride[2], stride[2]};
            copy_rows(c, head, stride[2], places, count, width, copy);
            return Rows<float>{copy, padded};
        };
        Packing packing(c);
        keys = gather(c.k, c.k_stride, c.head_dim, to.keys);
        // The values of latent attention are the first dims of its keys.
        const bool same = c.v == c.k && c.v_stride[0] == c.k_stride[0] && c.v_stride[1] == c.k_stride[1] &&
                          c.v_stride[2] == c.k_stride[2] && c.value_dim <= c.head_dim;
        values = same ? keys : gather(c.v, c.v_stride, c.value_dim, to.values);
    }
};

// The queries of an item, in rows and in lanes. Forward, they have the sign of the scale.
INLINE void load_queries(const ringtile_call &c, const ListItem &item, float sign, const ListScratch &to) {
    Packing packing(c);
    const int64_t width = whole_vectors(c.head_dim);
    copy_rows(c, row_at(c, c.q, c.q_stride, item.b, item.head, item.query), c.q_stride[1], nullptr, item.rows, c.head_dim,
              to.rows);
    for (int64_t i = 0; i < item.rows * width && sign != 1; i++) to.rows[i] = sign == 0 ? 0 : sign * to.rows[i];
    transpose_in(Rows<float>{to.rows, width}, 0, item.rows, 0, item.end, c.head_dim, 1.0f, to.lanes);
}

// Scores [key][GROUP] of the lanes from `lane` on. Few heads have their dims in the lanes, in both passes.
INLINE void list_scores(const ringtile_call &c, const ListItem &item, const ListTile &tile, int vectors, int lane,
                        const ListScratch &to) {
    if (c.heads / c.kv_heads > DECODE_QUERIES)
        return matmul<float, true>(vectors, tile.keys.x, tile.keys.step, to.lanes + lane * c.head_dim, GROUP<float>, to.scores,
                                   GROUP<float>, tile.count, c.head_dim, false);
    const int64_t width = whole_vectors(c.head_dim);
    decode_scores<float>({to.rows, width}, item.rows, tile.keys, tile.count, width, to.decoded);
    for (int k = 0; k < tile.count; k++)
        for (int l = 0; l < item.end; l++)
            to.scores[k * GROUP<float> + l] = l < item.rows ? to.decoded[l * MAX_BLOCK + k] : 0;
}

// Add weights [key][GROUP] of the lanes from `lane` on, times rows of keys or values, to sums [row][width].
INLINE void add_rows(const ListItem &item, const ListTile &tile, int lane, const float *weights, Rows<float> rows, int64_t width,
                     float *sums) {
    const int64_t padded = whole_vectors(width);
    for (int64_t d = 0; d < padded; d += GROUP<float>)
        matmul<float, false>((int)min(NR, (padded - d) / Lanes<float>::count), weights, GROUP<float>, rows.x + d, rows.step,
                             sums + lane * padded + d, padded, min(GROUP<float>, item.rows - lane), tile.count, true);
}

INLINE void clear_rows(float *sums, const ListItem &item, int64_t width) {
    for (int64_t i = 0; i < item.rows * whole_vectors(width); i++) sums[i] = 0;
}

inline void list_forward(const ringtile_call &c, int64_t number, float *memory) {
    constexpr int L = Lanes<float>::count;
    const ListItem item(c, number);
    const ListScratch to(c, memory);
    const KeyList list(c, item.b, item.kv, item.query, 0, c.n_keys);
    const int64_t width = whole_vectors(c.value_dim);
    const float base = base_of<float>(c), scale = (float)size_of_scale(c);
    load_queries(c, item, sign_of<float>(c), to);
    clear_rows(to.sums, item, c.value_dim);
    Softmax<float> softmax(c, to.softmax);
    softmax.value_dim = 0;  // its sums are rows here
    softmax.clear(0, MAX_BLOCK);
    for (int64_t place = list.first; place < list.last; place += LIST_TILE) {
        const ListTile tile(c, item, list, place, to);
        for (int lane = 0; lane < item.rows; lane += GROUP<float>) {
            const int vectors = (int)min(NR, (item.end - lane) / L), last = (int)min(lane + GROUP<float>, item.rows);
            float before[GROUP<float>], share[GROUP<float>];
            for (int i = 0; i < GROUP<float>; i++) before[i] = softmax.highest[lane + i];
            list_scores(c, item, tile, vectors, lane, to);
            VectorWeights<float>::weigh(vectors, to.scores, 0, tile.count, lane, base, Mask{}, nullptr, softmax);
            for (int n = 0; n < vectors; n++)
                store(share + n * L, exp2<float>((load(before + n * L) - load(softmax.highest + lane + n * L)) * base));
            for (int row = lane; row < last; row++) {
                if (before[row - lane] == softmax.highest[row]) continue;
                for (int64_t d = 0; d < width; d += L)
                    store(to.sums + row * width + d, load(to.sums + row * width + d) * share[row - lane]);
            }
            add_rows(item, tile, lane, to.scores, tile.values, c.value_dim, to.sums);
        }
    }
    float share[MAX_BLOCK];
    for (int row = 0; row < item.rows; row++) {
        const float highest = softmax.highest[row], total = softmax.total[row];
        const bool empty = list.first == list.last;
        share[row] = empty ? 0 : 1 / total;
        ((float *)c.lse)[(item.b * c.heads + item.head + row) * c.n_queries + item.query] =
            empty ? -infinity<float>() : highest * scale + exact_log(total);
    }
    write_rows(c, to.sums, item.rows, c.value_dim, share, row_at(c, c.out, c.out_stride, item.b, item.head, item.query),
               c.out_stride[1]);
}

// Where an item of the backward pass leaves the weights of a query [place][head of the key head], then the gradients of
// its scores.
INLINE float *list_weights(const ringtile_call &c, int64_t b, int64_t kv, int64_t query) {
    const int64_t window = c.lists.last_query - c.lists.first_query;
    const int64_t number = (b * c.kv_heads + kv) * window + query - c.lists.first_query;
    return c.lists.weights + number * 2 * c.lists.list_length * c.block * (c.heads / c.kv_heads);
}

// The gradients of the queries of an item, and the weights and gradients of scores from which those of keys are made.
inline void list_query_grads(const ringtile_call &c, int64_t number, float *memory) {
    constexpr int L = Lanes<float>::count;
    const ListItem item(c, number);
    const ListScratch to(c, memory);
    const KeyList list(c, item.b, item.kv, item.query, 0, c.n_keys);
    const int64_t width = whole_vectors(c.value_dim), ratio = c.heads / c.kv_heads, skipped = item.head - item.kv * ratio;
    const float scale = (float)c.options.scale;
    load_queries(c, item, 1, to);
    const char *out_grad = row_at(c, c.backward.out_grad, c.backward.out_grad_stride, item.b, item.head, item.query);
    copy_rows(c, out_grad, c.backward.out_grad_stride[1], nullptr, item.rows, c.value_dim, to.grad_rows);
    transpose_in(Rows<float>{to.grad_rows, width}, 0, item.rows, 0, item.end, c.value_dim, 1.0f, to.grad_lanes);
    // As matmul adds products: the gradient of a row's only score is then 0, to the last bit.
    copy_rows(c, row_at(c, c.out, c.out_stride, item.b, item.head, item.query), c.out_stride[1], nullptr, item.rows,
              c.value_dim, to.sums);
    float lse[MAX_BLOCK], delta[MAX_BLOCK], ones[MAX_BLOCK];
    for (int row = 0; row < MAX_BLOCK; row++) {
        const int64_t at = (item.b * c.heads + item.head + row) * c.n_queries + item.query;
        lse[row] = infinity<float>(), delta[row] = 0, ones[row] = 1;
        if (row >= item.rows || ((const float *)c.lse)[at] == -infinity<float>()) continue;
        lse[row] = ((const float *)c.lse)[at];
        for (int64_t d = 0; d < c.value_dim; d++)
            delta[row] = fused(to.sums[row * width + d], to.grad_rows[row * width + d], delta[row]);
        if (c.backward.lse_grad) delta[row] -= ((const float *)c.backward.lse_grad)[at];
    }
    clear_rows(to.sums, item, c.head_dim);
    float *weights = list_weights(c, item.b, item.kv, item.query), *slopes = weights + c.lists.list_length * c.block * ratio;
    for (int64_t place = list.first; place < list.last; place += LIST_TILE) {
        const ListTile tile(c, item, list, place, to);
        for (int lane = 0; lane < item.rows; lane += GROUP<float>) {
            const int vectors = (int)min(NR, (item.end - lane) / L), rows = (int)min(GROUP<float>, item.rows - lane);
            list_scores(c, item, tile, vectors, lane, to);
            matmul<float, true>(vectors, tile.values.x, tile.values.step, to.grad_lanes + lane * c.value_dim, GROUP<float>,
                                to.grads, GROUP<float>, tile.count, c.value_dim, false);
            for (int k = 0; k < tile.count; k++) {
                float *score = to.scores + k * GROUP<float>, *grad = to.grads + k * GROUP<float>;
                for (int n = 0; n < vectors * L; n += L) {
                    const Vec<float> p = exp2<float>(exponent_of<float>(load(score + n), scale, load(lse + lane + n)));
                    store(score + n, p);
                    store(grad + n, p * (load(grad + n) - load(delta + lane + n)) * scale);
                }
                const int64_t at = (place + k) * ratio + skipped + lane;
                for (int i = 0; i < rows; i++) weights[at + i] = score[i], slopes[at + i] = grad[i];
            }
            add_rows(item, tile, lane, to.grads, tile.keys, c.head_dim, to.sums);
        }
    }
    const int64_t at = (item.b * c.heads + item.head) * c.n_queries + item.query;
    write_rows(c, to.sums, item.rows, c.head_dim, ones, (char *)c.backward.q_grad + at * c.head_dim * (c.dtype == RINGTILE_FLOAT32 ? 4 : 2),
               c.n_queries * c.head_dim);
}

// Add what the queries of the window leave to the gradients of some keys, float32, in the order of the queries.
inline void list_key_grads(const ringtile_call &c, int64_t number, float *memory) {
    const ListScratch to(c, memory);
    const int64_t chunks = (c.n_keys + c.lists.chunk_keys - 1) / c.lists.chunk_keys, ratio = c.heads / c.kv_heads;
    const int64_t low = number % chunks * c.lists.chunk_keys, head = number / chunks, b = head / c.kv_heads, kv = head % c.kv_heads;
    int32_t keys[LIST_TILE];
    auto add = [&](const float *weights, const float *rows, int64_t width, int count, void *grads) {
        const int64_t padded = whole_vectors(width);
        for (int64_t d = 0; d < width; d += GROUP<float>) {
            matmul<float, true>((int)min(NR, (padded - d) / Lanes<float>::count), weights, ratio, rows + d, padded, to.scores,
                                GROUP<float>, count, ratio, false);
            for (int k = 0; k < count; k++) {
                float *grad = (float *)grads + (head * c.n_keys + keys[k]) * width + d;
                for (int64_t i = 0; i < min(GROUP<float>, width - d); i++) grad[i] += to.scores[k * GROUP<float> + i];
            }
        }
    };
    for (int64_t query = c.lists.first_query; query < c.lists.last_query; query++) {
        const KeyList list(c, b, kv, query, low, low + c.lists.chunk_keys);
        if (list.first == list.last) continue;
        copy_rows(c, row_at(c, c.q, c.q_stride, b, kv * ratio, query), c.q_stride[1], nullptr, (int)ratio, c.head_dim, to.rows);
        copy_rows(c, row_at(c, c.backward.out_grad, c.backward.out_grad_stride, b, kv * ratio, query),
                  c.backward.out_grad_stride[1], nullptr, (int)ratio, c.value_dim, to.grad_rows);
        const float *weights = list_weights(c, b, kv, query), *slopes = weights + c.lists.list_length * c.block * ratio;
        for (int64_t place = list.first; place < list.last; place += LIST_TILE) {
            const int count = (int)min(LIST_TILE, list.last - place);
            list.keys(place, count, keys);
            add(slopes + place * ratio, to.rows, c.head_dim, count, c.backward.k_grad);
            add(weights + place * ratio, to.grad_rows, c.value_dim, count, c.backward.v_grad);
        }
    }
}

}  // namespace ISA
