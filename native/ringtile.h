// The C interface of the native kernel: one structure in, no torch, no C++ runtime.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum ringtile_dtype { RINGTILE_FLOAT32 = 0, RINGTILE_FLOAT64 = 1, RINGTILE_BFLOAT16 = 2, RINGTILE_FLOAT16 = 3 };

// What ringtile_peak measures: floating-point operations, exponentials or bytes read, a second.
enum ringtile_rate {
    RINGTILE_FMA_FLOAT32 = 0,
    RINGTILE_FMA_FLOAT64 = 1,
    RINGTILE_DOT_BFLOAT16 = 2,
    RINGTILE_EXP_FLOAT32 = 3,
    RINGTILE_EXP_FLOAT64 = 4,
    RINGTILE_READ = 5
};

// A call. Tensors are [B, H, N, D] with strides in elements for B, H and N and a contiguous last dimension; lse, its
// gradient and delta are contiguous [B, H, Nq] in the accumulation type (float, double for float64). The index fields
// are those of BlockIndex.
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
    // Work entries (row slot, first, last, piece or -1, pieces of the row), sorted by group: those of group g from
    // work_begin[g] on; and for each batch row and head, in that order, the number of its first work item; n_splits
    // pieces of rows have a place in scratch, for each head.
    const int32_t *work;
    const int64_t *work_begin, *item_begin;
    int64_t n_splits;

    const int32_t *key_bits;
    int64_t key_words;
    const int64_t *key_lengths;

    double scale;
    int64_t seed;
    int32_t dropout_threshold, phase;

    // Backward. The gradients are contiguous and have the tensors' type; but that of q, where columns add to it (phase 1),
    // is in the accumulation type, and zero to begin with.
    const void *out_grad;
    int64_t out_grad_stride[3];
    const void *lse_grad;
    void *delta;
    void *q_grad, *k_grad, *v_grad;

    // The work items of this call, and the columns where an item is a head; scratch for the pieces of long rows, and in
    // the backward pass of long columns.
    int64_t first_item, last_item, first_col, last_col;
    void *scratch;

    // Backward: in how many pieces the list of each slot is summed, 1 for most. A thread that has a whole head holds
    // the sums of a row's later pieces apart: n_held rows of a head have a place there, row_held says which.
    const int32_t *row_pieces, *col_pieces, *row_held;
    int64_t n_held;
    void *held;
    // Pieces (item, batch row and head, first, last) of the rows or columns that several threads compute, sorted; they
    // come before the other items of their phase.
    const int64_t *parts;
    int64_t n_parts;

    // Where not null: nanoseconds of packing, and of all that the threads did, are added to these two.
    int64_t *times;
} ringtile_call;

#ifdef __cplusplus
}
#endif
