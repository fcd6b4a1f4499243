// The C interface of the native kernel: one structure in, no torch, no C++ runtime.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Raise it with every change of ringtile_call or of a function's meaning.
#define RINGTILE_ABI 6

// The last one is float32 whose products may take a number as the sum of two bfloat16 numbers. Sets with tiles know it.
enum ringtile_dtype {
    RINGTILE_FLOAT32 = 0,
    RINGTILE_FLOAT64 = 1,
    RINGTILE_BFLOAT16 = 2,
    RINGTILE_FLOAT16 = 3,
    RINGTILE_FLOAT32_PARTS = 4
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

// One call. Tensors are [B, H, N, D] with strides in elements for B, H and N and a contiguous last dimension. lse, its
// gradient and delta are contiguous [B, H, Nq] in the accumulation type: float, or double for float64. The index fields
// are those of BlockIndex. A slot is a row or column of tiles in one group. Its list of tiles can be cut into splits.
typedef struct ringtile_call {
    int32_t dtype, isa, threads, block;
    int64_t batch, heads, kv_heads, n_queries, n_keys, head_dim, value_dim;
    const void *q, *k, *v;
    int64_t q_stride[3], k_stride[3], v_stride[3];
    void *out;
    int64_t out_stride[3];
    void *lse;

    int64_t start, n_rows, n_cols, n_groups, group_stride[2];
    const int32_t *group;
    const int32_t *full_row_ptr, *full_col, *part_row_ptr, *part_col, *part_tile;
    const int32_t *full_col_ptr, *full_row, *part_col_ptr, *part_row, *part_tile_t;
    const int32_t *bits, *bits_t, *rows_any, *cols_any;
    // If not null, the tile in position space that each row or column tile holds. Only dropout depends on it.
    const int32_t *row_at, *col_at;
    // Forward work entries (row slot, first, last, split or -1, splits of the row), sorted by group: group g starts at
    // work_begin[g]. item_begin is the number of the first work item of each batch row and head, in that order. Each of
    // the n_splits splits has a place in scratch, per head.
    const int32_t *work;
    const int64_t *work_begin, *item_begin;
    int64_t n_splits;

    const int32_t *key_bits;
    int64_t key_words;
    const int64_t *key_lengths;

    double scale;
    // If not null, the numbers of the heads and batch elements in the whole problem, for dropout.
    const int64_t *head_at, *batch_at;
    int64_t seed;
    int32_t dropout_threshold, phase;

    // Backward. The gradients are contiguous and have the dtype of the tensors. In phase 1 columns add to q_grad: there
    // it has the accumulation type, starts as zeros, and holds the gradients after the call with the last column. The call
    // with the first column computes delta, which phases 2 and 3 need from phase 0.
    const void *out_grad;
    int64_t out_grad_stride[3];
    const void *lse_grad;
    void *delta;
    void *q_grad, *k_grad, *v_grad;

    // The work items of this call, and its columns if an item is a head. Scratch is for the splits of rows and, in the
    // backward pass, of columns: there each of shared_splits has 128 numbers per dim, dims rounded up to 16.
    int64_t first_item, last_item, first_col, last_col;
    void *scratch;

    // Backward: the number of splits of each slot, usually 1. In phase 1 a thread sums the first split of a row in place
    // and each later one in a buffer: n_row_buffers per head, row_buffer is the buffer of each slot.
    const int32_t *row_splits, *col_splits, *row_buffer;
    int64_t n_row_buffers;
    void *row_buffers;
    // Splits (item, batch row and head, first, last) of the rows or columns that several threads share, sorted. They come
    // before the other items of their phase.
    const int64_t *shared_splits;
    int64_t n_shared_splits;

    // If not null, the call adds its packing time and total thread time to these two, in nanoseconds.
    int64_t *times;

    // Masses (ringtile_masses): float32 [B, H, n_pooled, ceil(n_keys / segment)] in out, contiguous. Query m sees the keys
    // before seen[m]. Output row r pools the queries from pool_begin[r] to pool_begin[r + 1] - 1, by their maximum if
    // pool_max is not 0, by their mean otherwise. An item is pooled_step output rows of a head. The bias of scores has
    // strides for B and Hkv. If by_sign is not 0, queries have half the head_dim, and relu(q) and relu(-q) meet the halves
    // of a key. There are no values: v is k, and value_dim 0.
    int64_t segment, n_pooled, pooled_step;
    const int64_t *seen;
    const int32_t *pool_begin;
    const float *bias;
    int64_t bias_stride[2];
    int32_t pool_max, by_sign;
} ringtile_call;

#ifdef __cplusplus
}
#endif
