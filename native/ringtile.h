// The C interface of the native kernel: one structure in, no torch, no C++ runtime.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Raise it with every change of ringtile_call or of a function's meaning.
#define RINGTILE_ABI 18

// FLOAT32_PARTS is float32 whose products may take a number as the sum of two bfloat16 numbers, in sets with tiles. INT8 is
// for ringtile_masses and ringtile_scores alone.
enum ringtile_dtype {
    RINGTILE_FLOAT32 = 0,
    RINGTILE_FLOAT64 = 1,
    RINGTILE_BFLOAT16 = 2,
    RINGTILE_FLOAT16 = 3,
    RINGTILE_FLOAT32_PARTS = 4,
    RINGTILE_INT8 = 5
};

// The rates that ringtile_peak measures, per second: floating-point operations, exponentials, bytes read.
enum ringtile_rate {
    RINGTILE_FMA_FLOAT32 = 0,
    RINGTILE_FMA_FLOAT64 = 1,
    RINGTILE_DOT_BFLOAT16 = 2,
    RINGTILE_EXP_FLOAT32 = 3,
    RINGTILE_EXP_FLOAT64 = 4,
    RINGTILE_READ = 5
};

// What the items of a call are. Phases of the forward pass:
enum ringtile_forward_phase {
    RINGTILE_ATTEND = 0,  // the work entries
    RINGTILE_COMBINE = 1  // the splits of rows, after all entries
};

// Phases of the backward pass: the delta of all heads, then rows and columns, or else heads alone, which do all of it.
enum ringtile_backward_phase {
    RINGTILE_DELTA = 0,
    RINGTILE_HEADS = 1,        // all columns of a key head, with the gradients of its queries
    RINGTILE_ROWS = 2,         // rows, and the shared splits of rows
    RINGTILE_COLUMNS = 3,      // columns, and the shared splits of columns
    RINGTILE_FOLD_ROWS = 4,    // sums of the shared splits of rows, after RINGTILE_ROWS
    RINGTILE_FOLD_COLUMNS = 5  // sums of the shared splits of columns, after RINGTILE_COLUMNS
};

// Phases of attention over lists of keys:
enum ringtile_lists_phase {
    RINGTILE_LISTS_UNIONS = 0,       // the unions of runs, if a run is longer than 1
    RINGTILE_LISTS_FORWARD = 1,      // out and lse
    RINGTILE_LISTS_QUERY_GRADS = 2,  // gradients of queries, and weights
    RINGTILE_LISTS_KEY_GRADS = 3     // gradients of keys and values, from the weights of the same runs
};

// The numbers of a call: of its dtype, and of the accumulation type, float, or double for float64. Neither is defined: the
// names are the element types of pointers, which dispatch.cpp lists and Python compares with its tensors.
typedef struct ringtile_number ringtile_number;
typedef struct ringtile_sum ringtile_sum;

// One call. Tensors are [B, H, N, D] with strides in elements for B, H and N and a contiguous last dimension. lse, its
// gradient and delta are contiguous [B, H, Nq] in the accumulation type. dispatch.cpp lists the fields, from which Python
// builds its structure. Only the numbers of the first line have four bytes.
typedef struct ringtile_call {
    int32_t dtype, isa, threads, block;
    int64_t batch, heads, kv_heads, n_queries, n_keys, head_dim, value_dim;
    const ringtile_number *q, *k, *v;
    int64_t q_stride[3], k_stride[3], v_stride[3];
    ringtile_number *out;
    int64_t out_stride[3];
    ringtile_sum *lse;

    // The fields of a BlockIndex. A slot is a row or column of tiles in one group. Its list of tiles can be cut into splits.
    struct {
        int64_t start, n_rows, n_cols, n_groups, group_stride[2];
        const int32_t *group;
        const int32_t *full_row_ptr, *full_col, *part_row_ptr, *part_col, *part_tile;
        const int32_t *full_col_ptr, *full_row, *part_col_ptr, *part_row, *part_tile_t;
        const int32_t *bits, *bits_t, *rows_any, *cols_any;
        // If not null, the tile in position space that each row or column tile holds, for dropout and slopes.
        const int32_t *row_at, *col_at;
    } index;

    struct {
        double scale;
        const int32_t *key_bits;
        int64_t key_words;
        const int64_t *key_lengths;
        // If not null, the numbers of the heads and batch elements in the whole problem, for dropout.
        const int64_t *head_at, *batch_at;
        int64_t seed, dropout_threshold;
        // With a softcap above 0, slopes [H] of ALiBi or a bias, scores are multiplied by true_scale, then transformed
        // (transform.h), and scale is 1.
        double softcap, true_scale;
        const double *slopes;
        // If not null, numbers [B, H, Nq or 1, added_places] in the accumulation type, with strides for B, H and the
        // queries. Query i and key j add place added_keys[j] - added_queries[i], or the nearest that exists. A head has
        // fewer than 2^31 of them.
        const ringtile_sum *added;
        int64_t added_stride[3], added_places;
        const int32_t *added_queries, *added_keys;
    } options;

    // The work items of this call, and its columns if an item is a head.
    struct {
        int64_t phase, first_item, last_item, first_col, last_col;
        // Room for the splits of rows and, in the backward pass, of columns: there each of shared_splits has 128 numbers
        // per dim, dims rounded up to 16.
        ringtile_sum *scratch;
        // If not null, the call adds its packing time and total thread time to these two, in nanoseconds.
        int64_t *times;
    } work;

    struct {
        // Work entries (row slot, first, last, split or -1, splits of the row), sorted by group: group g starts at
        // work_begin[g]. item_begin is the number of the first entry of each batch row and head, in that order. Each of
        // the n_splits splits has a place in scratch, per head.
        const int32_t *work;
        const int64_t *work_begin, *item_begin;
        int64_t n_splits;
    } forward;

    struct {
        const ringtile_number *out_grad;
        int64_t out_grad_stride[3];
        const ringtile_sum *lse_grad;
        ringtile_sum *delta;
        // Contiguous. RINGTILE_HEADS adds to q_sums instead of q_grad: they start as zeros, and hold the gradients after
        // the call with the last column. The call with the first column computes delta.
        ringtile_number *q_grad, *k_grad, *v_grad;
        ringtile_sum *q_sums;
        // The number of splits of each slot, usually 1. In RINGTILE_HEADS a thread sums the first split of a row in place
        // and each later one in a buffer: n_row_buffers per head, row_buffer is the buffer of each slot.
        const int32_t *row_splits, *col_splits, *row_buffer;
        int64_t n_row_buffers;
        ringtile_sum *row_buffers;
        // Splits (item, batch row and head, first, last) of the rows or columns that several threads share, sorted. They
        // come before the other items of their phase.
        const int64_t *shared_splits;
        int64_t n_shared_splits;
        // If not null, columns add the gradients of the added numbers to these, with strides for B, H and the queries. No
        // two keys of a query may share a place, unless RINGTILE_HEADS computes them, where one thread has a head.
        ringtile_sum *added_grad;
        int64_t added_grad_stride[3];
    } backward;

    // ringtile_masses: [B, H, n_pooled, ceil(n_keys / segment)] in sums, contiguous. Query m sees the keys before
    // seen[m]. Output row r pools the queries from pool_begin[r] to pool_begin[r + 1] - 1, by their maximum if pool_max is
    // not 0, by their mean otherwise. An item is pooled_step output rows of a head. The bias of scores has strides for B
    // and Hkv. If by_sign is not 0, queries have half the head_dim, and relu(q) and relu(-q) meet the halves of a key.
    // There are no values: v is k, and value_dim 0.
    // Numbers of INT8 have a head_dim that is a multiple of 4, contiguous keys, a scale for each query and key, [B, H, Nq]
    // and [B, Hkv, Nk], in base 2 and with that of the products, and the sum of each key's numbers. Output rows pool root
    // mean squares. A key whose scale is not finite is a NaN. The bias is 0 or -inf, and by_sign 0.
    // ringtile_scores: [n_queries, n_keys] in sums, with a stride for the queries, out_stride[2], of such numbers of one
    // batch element and key head: the sum over the heads of products, negative ones 0 if relu is not 0, times both scales.
    // An item is 32 queries with 1,024 keys, those of the first keys first.
    struct {
        float *sums;
        int64_t segment, n_pooled, pooled_step;
        const int64_t *seen;
        const int32_t *pool_begin;
        const float *bias;
        int64_t bias_stride[2], pool_max, by_sign, relu;
        const float *query_scale, *key_scale;
        const int32_t *key_sum;
    } masses;

    // ringtile_lists: int32 lists of entries for each query, [B, list_groups, n_queries, list_length], with a stride for B.
    // Each ascends and ends in numbers below 0. An entry is `block` tokens, a power of two. Query i keeps the keys from
    // limits[i][0] to limits[i][1] - 1 of its list, [B, n_queries, 2], with a stride for B. A run is up to 16 queries, and
    // is computed at once if its union, [B, list_groups, runs, union_room], has a length: if `union_cost` times its entries
    // are no more than those of its lists. Then `run` times the heads of a key head is 16 at most. Items are unions,
    // list_rows heads of a key head for item_runs runs of the call, 1 if runs are 1 and 8 at most, or chunk_keys keys.
    // `weights` has weights_room numbers per key head from first_head on and run of the call: two for each place in a list,
    // query and head. The gradients of keys and values are key_sums and value_sums: they start as zeros, and each call
    // adds to them.
    struct {
        const int32_t *indices;
        int64_t indices_stride, list_groups, list_length;
        const int32_t *limits;
        int64_t limits_stride, list_rows, run, item_runs, first_run, last_run, first_head;
        int32_t *union_entries;
        uint16_t *union_bits;
        int64_t *union_length, union_room, union_cost, chunk_keys;
        float *weights;
        int64_t weights_room;
        float *key_sums, *value_sums;
    } lists;
} ringtile_call;

#ifdef __cplusplus
}
#endif
