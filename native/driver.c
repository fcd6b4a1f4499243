// Random small problems through the C interface, with an index made here, against a plain loop in double: what runs
// under the sanitizers and valgrind. Every buffer has its exact size, what lies between rows is NaN, and so is what no
// pair keeps. Usage: driver [cases] [seed]
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ringtile.h"
#if defined(_WIN32)
#include <windows.h>
#define OPEN(path) ((void *)LoadLibraryA(path))
#define FIND(library, name) ((void *)GetProcAddress((HMODULE)(library), name))
#else
#include <dlfcn.h>
#define OPEN(path) dlopen(path, RTLD_NOW | RTLD_LOCAL)
#define FIND(library, name) dlsym(library, name)
#endif

void ringtile_use_runtime(void *parallel, void *thread_number, void *push_threads, void *fork_call);
int64_t ringtile_call_size(void);
int ringtile_isa_count(void);
const char *ringtile_isa_name(int isa);
int ringtile_isa_runs(int isa);
int ringtile_forward(const ringtile_call *call);
int ringtile_backward(const ringtile_call *call);

static uint64_t state;

static uint32_t draw(uint32_t below) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(state >> 33) % below;
}

static double normal(void) {
    double sum = 0;
    for (int i = 0; i < 12; i++) sum += draw(1 << 20) / (double)(1 << 20);
    return sum - 6;
}

static void *room(int64_t count, int64_t size) {
    void *found = malloc(count > 0 ? count * size : 1);
    if (!found) abort();
    return found;
}

static int32_t *cut(int32_t *x, int64_t count) {
    int32_t *found = realloc(x, count > 0 ? count * 4 : 1);
    if (!found) abort();
    return found;
}

// Numbers of the four types.

static const int sizes[] = {4, 8, 2, 2};

static void put(void *x, int64_t at, int dtype, double value) {
    if (dtype == RINGTILE_FLOAT32) ((float *)x)[at] = (float)value;
    else if (dtype == RINGTILE_FLOAT64) ((double *)x)[at] = value;
    else if (dtype == RINGTILE_FLOAT16) ((_Float16 *)x)[at] = (_Float16)value;
    else {
        float narrow = (float)value;
        uint32_t bits;
        memcpy(&bits, &narrow, 4);
        ((uint16_t *)x)[at] = isnan(value) ? 0x7fc0 : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
}

static double get(const void *x, int64_t at, int dtype) {
    if (dtype == RINGTILE_FLOAT32) return ((const float *)x)[at];
    if (dtype == RINGTILE_FLOAT64) return ((const double *)x)[at];
    if (dtype == RINGTILE_FLOAT16) return (double)((const _Float16 *)x)[at];
    uint32_t bits = (uint32_t)((const uint16_t *)x)[at] << 16;
    float wide;
    memcpy(&wide, &bits, 4);
    return wide;
}

// A tensor [B, H, N, D] with gaps between its rows, and its numbers in double.
typedef struct {
    void *memory;
    double *exact;
    int64_t heads, rows, width, stride[3];
    int dtype;
} tensor;

static int64_t place_of(const tensor *x, int64_t b, int64_t h, int64_t n) {
    return b * x->stride[0] + h * x->stride[1] + n * x->stride[2];
}

static double *row_of(const tensor *x, int64_t b, int64_t h, int64_t n) {
    return x->exact + ((b * x->heads + h) * x->rows + n) * x->width;
}

static void set(tensor *x, int64_t b, int64_t h, int64_t n, int64_t d, double value) {
    int64_t at = place_of(x, b, h, n) + d;
    put(x->memory, at, x->dtype, value);
    row_of(x, b, h, n)[d] = get(x->memory, at, x->dtype);
}

static tensor new_tensor(int dtype, int64_t batch, int64_t heads, int64_t rows, int64_t width, int filled) {
    tensor x = {0};
    x.heads = heads, x.rows = rows, x.width = width, x.dtype = dtype;
    if (draw(2)) x.stride[2] = width + draw(4), x.stride[1] = rows * x.stride[2], x.stride[0] = heads * x.stride[1];
    else x.stride[1] = width + draw(4), x.stride[2] = heads * x.stride[1], x.stride[0] = rows * x.stride[2];
    int64_t count = place_of(&x, batch - 1, heads - 1, rows - 1) + width;
    x.memory = room(count, sizes[dtype]);
    x.exact = room(batch * heads * rows * width, sizeof(double));
    for (int64_t i = 0; filled && i < count; i++) put(x.memory, i, dtype, NAN);
    for (int64_t b = 0; filled && b < batch; b++)
        for (int64_t h = 0; h < heads; h++)
            for (int64_t n = 0; n < rows; n++)
                for (int64_t d = 0; d < width; d++) set(&x, b, h, n, d, normal());
    return x;
}

static void drop(tensor *x) {
    free(x->memory);
    free(x->exact);
}

// The index: what pairs are kept, and their tiles.

static int keeps(int kind, int64_t group, int64_t i, int64_t j) {
    switch (kind) {
    case 0: return 1;
    case 1: return j <= i;
    case 2: return i - j <= 20 + 9 * group && j - i <= 3;
    case 3: return (i * i + 3 * j + group) % 7 < 3;
    case 4: return i % 5 != 2 && j % 3 != 1 && llabs(i - j) < 40;
    default: return 0;
    }
}

typedef struct {
    int32_t *ptr, *other, *tile, *other_t, *ptr_t, *tile_t;
    int32_t count;
} list;

static list new_list(int64_t rows, int64_t cols, int64_t groups, const int32_t *states, int full) {
    list x = {room(groups * rows + 1, 4), 0, 0, 0, room(groups * cols + 1, 4), 0, 0};
    for (int64_t i = 0; i < groups * rows * cols; i++) x.count += full ? states[i] == -1 : states[i] >= 0;
    x.other = room(x.count, 4), x.tile = room(x.count, 4), x.other_t = room(x.count, 4), x.tile_t = room(x.count, 4);
    for (int transposed = 0; transposed < 2; transposed++) {
        int64_t outer = transposed ? cols : rows, inner = transposed ? rows : cols;
        int32_t at = 0;
        for (int64_t slot = 0; slot < groups * outer; slot++) {
            (transposed ? x.ptr_t : x.ptr)[slot] = at;
            for (int64_t o = 0; o < inner; o++) {
                int64_t group = slot / outer, row = transposed ? o : slot % outer, col = transposed ? slot % outer : o;
                int32_t tile = states[(group * rows + row) * cols + col];
                if (full ? tile != -1 : tile < 0) continue;
                (transposed ? x.other_t : x.other)[at] = (int32_t)o;
                (transposed ? x.tile_t : x.tile)[at++] = tile;
            }
        }
        (transposed ? x.ptr_t : x.ptr)[groups * outer] = at;
    }
    return x;
}

static void drop_list(list *x) {
    free(x->ptr), free(x->other), free(x->tile), free(x->other_t), free(x->ptr_t), free(x->tile_t);
}

static uint32_t dropout_half(uint64_t seed, uint32_t batch, uint32_t head, uint32_t query, uint32_t key) {
    uint32_t c[4] = {key / 32 * 4 + key / 2 % 4, query, head, batch}, k[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    for (int round = 0; round < 7; round++) {
        uint64_t a = (uint64_t)c[0] * 0xD2511F53u, b = (uint64_t)c[2] * 0xCD9E8D57u;
        c[0] = (uint32_t)(b >> 32) ^ c[1] ^ k[0], c[2] = (uint32_t)(a >> 32) ^ c[3] ^ k[1];
        c[1] = (uint32_t)b, c[3] = (uint32_t)a;
        k[0] += 0x9E3779B9u, k[1] += 0xBB67AE85u;
    }
    return c[key / 8 % 4] >> (key % 2 * 16) & 0xffff;
}

static int wrong(const char *name, const double *found, const double *wanted, int64_t count, double bound) {
    double error = 0, size = 0;
    for (int64_t i = 0; i < count; i++) {
        if (isinf(wanted[i]) && found[i] == wanted[i]) continue;
        error += (found[i] - wanted[i]) * (found[i] - wanted[i]);
        size += wanted[i] * wanted[i];
    }
    // What cancels is measured against numbers of size 1.
    if (sqrt(error) <= bound * sqrt(size) || sqrt(error) <= bound * sqrt((double)count)) return 0;
    printf("%s: error %g of %g\n", name, sqrt(error), sqrt(size));
    return 1;
}

static int run(int isa, int number) {
    static const int blocks[] = {16, 32, 64, 128};
    static const int widths[] = {1, 2, 7, 8, 16, 17, 33, 64, 65};
    const int block = blocks[draw(4)], dtype = number % 4, kind = number / 4 % 6, words = (block + 31) / 32;
    const int wide = dtype == RINGTILE_FLOAT64 ? RINGTILE_FLOAT64 : RINGTILE_FLOAT32;
    const int64_t batch = 1 + draw(2), kv_heads = 1 + draw(2), heads = kv_heads * (1 + draw(2)), groups = 1 + draw(2);
    const int64_t n_queries = 1 + draw(kind == 4 ? 90 : 200), n_keys = 1 + draw(220);
    const int64_t start = draw(3) ? draw(150) : -(int64_t)draw(150);
    const int64_t head_dim = widths[draw(9)], value_dim = widths[draw(9)];
    const int64_t first_row = start >= 0 ? start / block : -((-start + block - 1) / block);
    const int64_t last = start + n_queries - 1, last_row = last >= 0 ? last / block : -((-last + block - 1) / block);
    const int64_t rows = last_row - first_row + 1, cols = (n_keys + block - 1) / block;
    const double scales[] = {0.4, 1, -0.3, 0};
    const double scale = scales[draw(4)];
    const int dropped = draw(3) == 0, masked = draw(3) == 0, bounded = draw(4) == 0;
    const uint64_t seed = ((uint64_t)draw(1u << 31) << 33) ^ draw(1u << 31);
    const int threshold = dropped ? 20000 : 0;

    // Tiles: bits beyond the lengths mean nothing, so they are drawn.
    int32_t *states = room(groups * rows * cols, 4), n_tiles = 0;
    const int64_t slots = groups * rows * cols;
    int32_t *bits = room(slots * block * words, 4), *bits_t = room(slots * block * words, 4);
    int32_t *rows_any = room(slots * words, 4), *cols_any = room(slots * words, 4);
    for (int64_t slot = 0; slot < slots; slot++) {
        int64_t group = slot / (rows * cols), row = slot / cols % rows, col = slot % cols, kept = 0, all = 0;
        uint32_t *own = (uint32_t *)bits + (int64_t)n_tiles * block * words;
        uint32_t *own_t = (uint32_t *)bits_t + (int64_t)n_tiles * block * words;
        uint32_t *row_any = (uint32_t *)rows_any + n_tiles * words, *col_any = (uint32_t *)cols_any + n_tiles * words;
        memset(own, 0, block * words * 4), memset(own_t, 0, block * words * 4);
        memset(row_any, 0, words * 4), memset(col_any, 0, words * 4);
        for (int64_t a = 0; a < block; a++)
            for (int64_t b = 0; b < block; b++) {
                int64_t i = (first_row + row) * block + a, j = col * block + b;
                int inside = i >= start && i < start + n_queries && j < n_keys;
                int keep = inside ? keeps(kind, group, i, j) : (int)draw(2);
                all += inside, kept += inside && keep;
                if (!keep) continue;
                own[a * words + b / 32] |= 1u << (b % 32), own_t[b * words + a / 32] |= 1u << (a % 32);
                row_any[a / 32] |= 1u << (a % 32), col_any[b / 32] |= 1u << (b % 32);
            }
        states[slot] = kept == 0 ? -2 : kept == all && draw(4) ? -1 : n_tiles++;
    }
    bits = cut(bits, (int64_t)n_tiles * block * words), bits_t = cut(bits_t, (int64_t)n_tiles * block * words);
    rows_any = cut(rows_any, n_tiles * words), cols_any = cut(cols_any, n_tiles * words);
    list full = new_list(rows, cols, groups, states, 1), part = new_list(rows, cols, groups, states, 0);

    // Work: rows of more than two tiles in pieces.
    int32_t *work = room(groups * rows * (cols + 1) * 5, 4), pieces_in_all = 0;
    int64_t *work_begin = room(groups + 1, 8), entries = 0;
    for (int64_t slot = 0; slot < groups * rows; slot++) {
        if (slot % rows == 0) work_begin[slot / rows] = entries;
        int32_t length = full.ptr[slot + 1] - full.ptr[slot] + part.ptr[slot + 1] - part.ptr[slot];
        int32_t pieces = length > 2 ? (length + 1) / 2 : 1;
        for (int32_t piece = 0; piece < pieces; piece++, entries++) {
            int32_t entry[5] = {(int32_t)slot, length * piece / pieces, length * (piece + 1) / pieces, -1, pieces};
            if (pieces > 1) entry[3] = pieces_in_all++;
            memcpy(work + entries * 5, entry, sizeof(entry));
        }
    }
    work_begin[groups] = entries;
    work = cut(work, entries * 5);
    int32_t *group = room(batch * heads, 4);
    int64_t *item_begin = room(batch * heads + 1, 8);
    item_begin[0] = 0;
    for (int64_t head = 0; head < batch * heads; head++) {
        group[head] = (int32_t)((head % heads + head / heads) % groups);
        item_begin[head + 1] = item_begin[head] + work_begin[group[head] + 1] - work_begin[group[head]];
    }

    // The same for the backward pass; some of the lists that are cut, and only those, are computed apart.
    int32_t *row_splits = room(groups * rows, 4), *col_splits = room(groups * cols, 4);
    int32_t *row_buffer = room(groups * rows, 4);
    int64_t n_row_buffers = 0;
    for (int64_t slot = 0; slot < groups * rows; slot++) {
        int32_t length = full.ptr[slot + 1] - full.ptr[slot] + part.ptr[slot + 1] - part.ptr[slot];
        row_splits[slot] = length > 2 ? (length + 1) / 2 : 1;
        row_buffer[slot] = (int32_t)(slot % rows);
        if (row_splits[slot] > 1 && slot % rows >= n_row_buffers) n_row_buffers = slot % rows + 1;
    }
    for (int64_t slot = 0; slot < groups * cols; slot++) {
        int32_t length = full.ptr_t[slot + 1] - full.ptr_t[slot] + part.ptr_t[slot + 1] - part.ptr_t[slot];
        col_splits[slot] = length > 2 ? (length + 1) / 2 : 1;
    }
    int64_t n_shared_splits[2] = {0, 0}, *parts[2];
    for (int columns = 0; columns < 2; columns++) {
        int64_t places = columns ? cols : rows, own_heads = columns ? kv_heads : heads, ratio = heads / own_heads;
        parts[columns] = room(batch * heads * places * (rows + cols) * 4, 8);
        for (int64_t item = 0; item < batch * own_heads * places; item++) {
            int cut = 0;
            for (int64_t head = item / places * ratio; head < (item / places + 1) * ratio; head++)
                cut |= (columns ? col_splits : row_splits)[group[head] * places + item % places] > 1;
            if (!cut || draw(2)) continue;
            for (int64_t head = item / places * ratio; head < (item / places + 1) * ratio; head++) {
                int64_t slot = group[head] * places + item % places;
                const int32_t *f = columns ? full.ptr_t : full.ptr, *p = columns ? part.ptr_t : part.ptr;
                int64_t length = f[slot + 1] - f[slot] + p[slot + 1] - p[slot];
                int64_t pieces = (columns ? col_splits : row_splits)[slot];
                for (int64_t piece = 0; piece < pieces; piece++) {
                    int64_t entry[4] = {item, head, length * piece / pieces, length * (piece + 1) / pieces};
                    memcpy(parts[columns] + 4 * n_shared_splits[columns]++, entry, sizeof(entry));
                }
            }
        }
    }

    int64_t key_words = (n_keys + 31) / 32, *key_lengths = room(batch, 8);
    int32_t *key_bits = room(batch * key_words, 4);
    for (int64_t i = 0; i < batch * key_words; i++) key_bits[i] = (int32_t)(draw(1u << 31) * 2 + draw(2));
    for (int64_t b = 0; b < batch; b++) key_lengths[b] = draw((uint32_t)n_keys + 3);

    // What is kept, and NaN where nothing is.
    char *kept = room(batch * heads * n_queries * n_keys, 1);
    tensor q = new_tensor(dtype, batch, heads, n_queries, head_dim, 1);
    tensor k = new_tensor(dtype, batch, kv_heads, n_keys, head_dim, 1);
    tensor v = new_tensor(dtype, batch, kv_heads, n_keys, value_dim, 1);
    tensor out = new_tensor(dtype, batch, heads, n_queries, value_dim, 0);
    tensor grad = new_tensor(dtype, batch, heads, n_queries, value_dim, 1);
    for (int64_t head = 0; head < batch * heads; head++)
        for (int64_t a = 0; a < n_queries; a++) {
            int any = 0;
            for (int64_t j = 0; j < n_keys; j++) {
                int64_t b = head / heads;
                int keep = keeps(kind, group[head], start + a, j) && (!bounded || j < key_lengths[b]) &&
                           (!masked || (uint32_t)key_bits[b * key_words + j / 32] >> (j % 32) & 1);
                kept[(head * n_queries + a) * n_keys + j] = (char)keep;
                any |= keep;
            }
            if (any) continue;
            for (int64_t d = 0; d < head_dim; d++) set(&q, head / heads, head % heads, a, d, NAN);
            for (int64_t d = 0; d < value_dim; d++) set(&grad, head / heads, head % heads, a, d, INFINITY);
        }
    for (int64_t b = 0; b < batch; b++)
        for (int64_t g = 0; g < kv_heads; g++)
            for (int64_t j = 0; j < n_keys; j++) {
                int any = 0;
                for (int64_t h = g * heads / kv_heads; h < (g + 1) * heads / kv_heads; h++)
                    for (int64_t a = 0; a < n_queries; a++) any |= kept[((b * heads + h) * n_queries + a) * n_keys + j];
                if (any) continue;
                for (int64_t d = 0; d < head_dim; d++) set(&k, b, g, j, d, NAN);
                for (int64_t d = 0; d < value_dim; d++) set(&v, b, g, j, d, -INFINITY);
            }

    int64_t n_lse = batch * heads * n_queries, count = n_lse * value_dim;
    void *lse = room(n_lse, sizes[wide]), *lse_grad = room(n_lse, sizes[wide]), *delta = room(2 * n_lse, sizes[wide]);
    for (int64_t i = 0; i < n_lse; i++) put(lse_grad, i, wide, normal());
    void *grads[3];
    int64_t n_keys_in_all = batch * kv_heads * n_keys;
    int64_t grad_counts[3] = {n_lse * head_dim, n_keys_in_all * head_dim, n_keys_in_all * value_dim};
    bool by_columns = draw(2);
    int grad_types[3] = {by_columns ? wide : dtype, dtype, dtype};
    for (int i = 0; i < 3; i++) {
        grads[i] = room(grad_counts[i], sizes[grad_types[i]]);
        for (int64_t j = 0; j < grad_counts[i]; j++) put(grads[i], j, grad_types[i], i == 0 && by_columns ? 0 : NAN);
    }
    void *scratch = room(batch * heads * pieces_in_all * (value_dim + 2) * 128, sizes[wide]);
    void *held = room(batch * heads * n_row_buffers * head_dim * 128, sizes[wide]);
    void *sums[2] = {room(n_shared_splits[0] * head_dim * 128, sizes[wide]),
                     room(n_shared_splits[1] * (head_dim + value_dim) * 128, sizes[wide])};
    int64_t times[2] = {0, 0};

    ringtile_call c;
    memset(&c, 0, sizeof(c));
    c.dtype = dtype, c.isa = isa, c.threads = 1 + (int)draw(2), c.block = block;
    c.batch = batch, c.heads = heads, c.kv_heads = kv_heads, c.n_queries = n_queries, c.n_keys = n_keys;
    c.head_dim = head_dim, c.value_dim = value_dim;
    c.q = q.memory, c.k = k.memory, c.v = v.memory, c.out = out.memory, c.out_grad = grad.memory;
    memcpy(c.q_stride, q.stride, 24), memcpy(c.k_stride, k.stride, 24), memcpy(c.v_stride, v.stride, 24);
    memcpy(c.out_stride, out.stride, 24), memcpy(c.out_grad_stride, grad.stride, 24);
    c.lse = lse, c.lse_grad = number % 3 ? NULL : lse_grad, c.delta = delta, c.scratch = scratch;
    c.start = start, c.n_rows = rows, c.n_cols = cols, c.n_groups = groups;
    c.group_stride[0] = heads, c.group_stride[1] = 1, c.group = group;
    c.full_row_ptr = full.ptr, c.full_col = full.other, c.full_col_ptr = full.ptr_t, c.full_row = full.other_t;
    c.part_row_ptr = part.ptr, c.part_col = part.other, c.part_tile = part.tile;
    c.part_col_ptr = part.ptr_t, c.part_row = part.other_t, c.part_tile_t = part.tile_t;
    c.bits = bits, c.bits_t = bits_t, c.rows_any = rows_any, c.cols_any = cols_any;
    c.work = work, c.work_begin = work_begin, c.item_begin = item_begin, c.n_splits = pieces_in_all;
    c.key_bits = masked ? key_bits : NULL, c.key_words = key_words, c.key_lengths = bounded ? key_lengths : NULL;
    c.scale = scale, c.seed = (int64_t)seed, c.dropout_threshold = threshold;
    c.q_grad = grads[0], c.k_grad = grads[1], c.v_grad = grads[2];
    c.row_splits = row_splits, c.col_splits = col_splits;
    c.row_buffer = row_buffer, c.n_row_buffers = n_row_buffers, c.row_buffers = held;
    c.times = draw(2) ? times : NULL;

    int failed = 0;
    c.last_item = item_begin[batch * heads];
    failed |= ringtile_forward(&c);
    c.phase = 1;
    failed |= ringtile_forward(&c);
    c.phase = 0, c.last_item = batch * heads;
    failed |= ringtile_backward(&c);
    if (by_columns) {
        c.phase = 1, c.last_item = batch * kv_heads, c.last_col = cols / 2;
        failed |= ringtile_backward(&c);
        c.first_col = cols / 2, c.last_col = cols;
        failed |= ringtile_backward(&c);
    } else {
        for (int columns = 0; columns < 2; columns++) {
            c.shared_splits = parts[columns], c.n_shared_splits = n_shared_splits[columns], c.scratch = sums[columns];
            c.phase = 2 + columns;
            c.last_item = n_shared_splits[columns] + batch * (columns ? kv_heads * cols : heads * rows);
            failed |= ringtile_backward(&c);
            c.phase = 4 + columns, c.last_item = n_shared_splits[columns];
            failed |= ringtile_backward(&c);
        }
    }
    if (c.times ? times[0] < 0 || times[1] < times[0] : times[1] != 0) failed = 1, printf("times\n");

    // The same in double, pair by pair.
    double *wanted[5], *found[5];
    int64_t counts[5] = {count, n_lse, grad_counts[0], grad_counts[1], grad_counts[2]};
    for (int i = 0; i < 5; i++) wanted[i] = calloc(counts[i], 8), found[i] = room(counts[i], 8);
    double *weight = room(n_keys, 8), *share = room(n_keys, 8), rescale = 65536.0 / (65536 - threshold);
    for (int64_t head = 0; head < batch * heads; head++)
        for (int64_t a = 0; a < n_queries; a++) {
            int64_t b = head / heads, h = head % heads, g = h / (heads / kv_heads), at = head * n_queries + a;
            const char *own = kept + at * n_keys;
            const double *query = row_of(&q, b, h, a), *gradient = row_of(&grad, b, h, a);
            double top = -INFINITY, total = 0, mean = 0;
            for (int64_t j = 0; j < n_keys; j++) {
                if (!own[j]) continue;
                weight[j] = 0;
                for (int64_t d = 0; d < head_dim; d++) weight[j] += scale * query[d] * row_of(&k, b, g, j)[d];
                top = fmax(top, weight[j]);
            }
            for (int64_t j = 0; j < n_keys; j++)
                if (own[j]) total += weight[j] = exp(weight[j] - top);
            wanted[1][at] = total > 0 ? top + log(total) : -INFINITY;
            for (int64_t j = 0; j < n_keys; j++) {
                if (!own[j]) continue;
                weight[j] /= total;
                share[j] = 1;
                if (dropped) {
                    uint32_t half = dropout_half(seed, (uint32_t)b, (uint32_t)h, (uint32_t)(start + a), (uint32_t)j);
                    share[j] = half >= (uint32_t)threshold ? rescale : 0;
                }
                double product = 0;
                for (int64_t d = 0; d < value_dim; d++) {
                    wanted[0][at * value_dim + d] += weight[j] * share[j] * row_of(&v, b, g, j)[d];
                    wanted[4][((b * kv_heads + g) * n_keys + j) * value_dim + d] += weight[j] * share[j] * gradient[d];
                    product += gradient[d] * row_of(&v, b, g, j)[d];
                }
                share[j] *= product;
                mean += weight[j] * share[j];
            }
            if (c.lse_grad) mean -= get(lse_grad, at, wide);
            for (int64_t j = 0; j < n_keys; j++) {
                if (!own[j]) continue;
                double slope = weight[j] * (share[j] - mean) * scale;
                for (int64_t d = 0; d < head_dim; d++) {
                    wanted[2][at * head_dim + d] += slope * row_of(&k, b, g, j)[d];
                    wanted[3][((b * kv_heads + g) * n_keys + j) * head_dim + d] += slope * query[d];
                }
            }
            for (int64_t d = 0; d < value_dim; d++)
                found[0][at * value_dim + d] = get(out.memory, place_of(&out, b, h, a) + d, dtype);
            found[1][at] = get(lse, at, wide);
        }
    for (int i = 0; i < 3; i++)
        for (int64_t j = 0; j < grad_counts[i]; j++) found[i + 2][j] = get(grads[i], j, grad_types[i]);

    static const char *names[] = {"out", "lse", "q_grad", "k_grad", "v_grad"};
    static const double bounds[] = {2e-5, 1e-12, 3e-2, 4e-3};
    for (int i = 0; i < 5; i++)
        failed |= wrong(names[i], found[i], wanted[i], counts[i], bounds[i == 1 ? wide : dtype] * (dropped ? 2 : 1));
    if (failed)
        printf("%s case %d: dtype %d, block %d, kind %d, B %d, H %d / %d, %d queries from %d, %d keys, D %d, Dv %d\n",
               ringtile_isa_name(isa), number, dtype, block, kind, (int)batch, (int)heads, (int)kv_heads,
               (int)n_queries, (int)start, (int)n_keys, (int)head_dim, (int)value_dim);

    for (int i = 0; i < 5; i++) free(wanted[i]), free(found[i]);
    for (int i = 0; i < 3; i++) free(grads[i]);
    void *others[] = {weight, share, states, bits, bits_t, rows_any, cols_any, work, work_begin, group, item_begin,
                      key_lengths, key_bits, kept, lse, lse_grad, delta, scratch, held, sums[0], sums[1], row_splits,
                      col_splits, row_buffer, parts[0], parts[1]};
    for (unsigned i = 0; i < sizeof(others) / sizeof(*others); i++) free(others[i]);
    drop(&q), drop(&k), drop(&v), drop(&out), drop(&grad);
    drop_list(&full), drop_list(&part);
    return failed;
}

int main(int argc, char **argv) {
    int cases = argc > 1 ? atoi(argv[1]) : 96, failures = 0;
    if (ringtile_call_size() != (int64_t)sizeof(ringtile_call)) return 2;
    const char *path = getenv("RINGTILE_OPENMP");
    void *runtime = path ? OPEN(path) : NULL;
    if (path && !runtime) return printf("RINGTILE_OPENMP: cannot load %s\n", path), 3;
    if (runtime)
        ringtile_use_runtime(FIND(runtime, "GOMP_parallel"), FIND(runtime, "__kmpc_global_thread_num"),
                             FIND(runtime, "__kmpc_push_num_threads"), FIND(runtime, "__kmpc_fork_call"));
    for (int isa = 0; isa < ringtile_isa_count(); isa++) {
        if (!ringtile_isa_runs(isa)) {
            printf("%s: this processor lacks it\n", ringtile_isa_name(isa));
            continue;
        }
        int wrong_before = failures;
        for (int number = 0; number < cases; number++) {
            state = 0x9E3779B97F4A7C15u * (number + 1) + (argc > 2 ? strtoull(argv[2], NULL, 10) : 0);
            for (int i = 0; i < 4; i++) draw(2);
            failures += run(isa, number);
        }
        printf("%s: %d cases, %d wrong\n", ringtile_isa_name(isa), cases, failures - wrong_before);
    }
    return failures != 0;
}
