// Random small problems through the C interface, against a plain loop in double: the sanitizers and valgrind run it on
// every instruction set of the processor. Every buffer has its exact size. The memory between rows is NaN, and so are
// the tokens that no pair keeps. Usage: driver [cases] [seed]. RINGTILE_OPENMP names an OpenMP runtime to load. Without
// it, one thread computes.
#include <math.h>
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

int ringtile_abi_version(void);
void ringtile_use_runtime(void *parallel, void *thread_number, void *push_threads, void *fork_call);
int ringtile_isa_count(void);
const char *ringtile_isa_name(int isa);
const char *ringtile_isa_reason(int isa);
int ringtile_forward(const ringtile_call *call);
int ringtile_backward(const ringtile_call *call);
int ringtile_masses(const ringtile_call *call);
int ringtile_lists(const ringtile_call *call);
int ringtile_scores(const ringtile_call *call);
int64_t ringtile_kept(int64_t groups, int64_t heads, int64_t slots, const int32_t *base, const int32_t *pointer,
                      const int32_t *other, const int32_t *tile, const uint8_t *mask, const int64_t *strides,
                      int64_t capacity, int32_t *kept_pointer, int32_t *kept_other, int32_t *kept_tile);
void ringtile_ascending(int64_t rows, int64_t length, int64_t count, const int32_t *x, uint64_t *bits, int32_t *y);
int ringtile_best(int isa, int threads, int64_t rows, int64_t entries, int64_t stride, int64_t n, const float *scores,
                  float *values, int32_t *numbers);

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

// All memory of a case, freed at its end.
static void *allocations[128];
static int n_allocations;

static void *allocate(int64_t count, int64_t size) {
    if (n_allocations == sizeof(allocations) / sizeof(*allocations)) abort();
    void *found = malloc(count > 0 ? count * size : 1);
    if (!found) abort();
    return allocations[n_allocations++] = found;
}

static void *exactly(const void *x, int64_t count, int64_t size) {
    return memcpy(allocate(count, size), x, count * size);
}

static const int sizes[] = {4, 8, 2, 2, 4};  // bytes of each dtype

static void put(void *x, int64_t at, int dtype, double value) {
    if (dtype == RINGTILE_FLOAT32 || dtype == RINGTILE_FLOAT32_PARTS) ((float *)x)[at] = (float)value;
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
    if (dtype == RINGTILE_FLOAT32 || dtype == RINGTILE_FLOAT32_PARTS) return ((const float *)x)[at];
    if (dtype == RINGTILE_FLOAT64) return ((const double *)x)[at];
    if (dtype == RINGTILE_FLOAT16) return (double)((const _Float16 *)x)[at];
    uint32_t bits = (uint32_t)((const uint16_t *)x)[at] << 16;
    float wide;
    memcpy(&wide, &bits, 4);
    return wide;
}

// A tensor [B, H, N, D] with gaps between its rows, and its values in double.
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
    x.memory = allocate(count, sizes[dtype]);
    x.exact = allocate(batch * heads * rows * width, sizeof(double));
    for (int64_t i = 0; filled && i < count; i++) put(x.memory, i, dtype, NAN);
    for (int64_t b = 0; filled && b < batch; b++)
        for (int64_t h = 0; h < heads; h++)
            for (int64_t n = 0; n < rows; n++)
                for (int64_t d = 0; d < width; d++) set(&x, b, h, n, d, normal());
    return x;
}

// The kept pairs, by the positions of query and key.

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

// The full or the partial tiles of an index, and their transpose.
typedef struct {
    int32_t *ptr, *other, *tile, *other_t, *ptr_t, *tile_t;
    int32_t count;
} list;

static list new_list(int64_t rows, int64_t cols, int64_t groups, const int32_t *states, int full) {
    list x = {allocate(groups * rows + 1, 4), 0, 0, 0, allocate(groups * cols + 1, 4), 0, 0};
    for (int64_t i = 0; i < groups * rows * cols; i++) x.count += full ? states[i] == -1 : states[i] >= 0;
    x.other = allocate(x.count, 4), x.tile = allocate(x.count, 4), x.other_t = allocate(x.count, 4), x.tile_t = allocate(x.count, 4);
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

static int dropout_half(uint64_t seed, uint32_t batch, uint32_t head, uint32_t query, uint32_t key) {
    uint32_t c[4] = {key / 32 * 4 + key / 2 % 4, query, head, batch}, k[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    for (int round = 0; round < 7; round++) {
        uint64_t a = (uint64_t)c[0] * 0xD2511F53u, b = (uint64_t)c[2] * 0xCD9E8D57u;
        c[0] = (uint32_t)(b >> 32) ^ c[1] ^ k[0], c[2] = (uint32_t)(a >> 32) ^ c[3] ^ k[1];
        c[1] = (uint32_t)b, c[3] = (uint32_t)a;
        k[0] += 0x9E3779B9u, k[1] += 0xBB67AE85u;
    }
    return (int)(c[key / 8 % 4] >> (key % 2 * 16) & 0xffff);
}

static int wrong(const char *name, const double *found, const double *wanted, int64_t count, double bound) {
    double error = 0, size = 0;
    for (int64_t i = 0; i < count; i++) {
        if (isinf(wanted[i]) && found[i] == wanted[i]) continue;
        error += (found[i] - wanted[i]) * (found[i] - wanted[i]);
        size += wanted[i] * wanted[i];
    }
    // Sums that cancel are measured against values of size 1.
    if (sqrt(error) <= bound * sqrt(size) || sqrt(error) <= bound * sqrt((double)count)) return 0;
    printf("%s: error %g of %g\n", name, sqrt(error), sqrt(size));
    return 1;
}

typedef struct {
    ringtile_call c;
    int number, kind, wide, words, drops, by_columns;
    int64_t ratio;  // query heads per key head
    list full, part;
    int32_t *group, *row_splits, *col_splits;
    int64_t *shared_splits[2], n_shared_splits[2], grad_counts[3], times[2], added_count;
    int grad_types[3];
    void *grads[3];
    char *kept;  // of each pair [B, H, Nq, Nk]
    tensor q, k, v, out, out_grad;
    double scale, *slopes;  // of the scores before softcap and ALiBi, and null without slopes
} problem;

static int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b < 0); }

static int has_tiles(int isa) { return !strncmp(ringtile_isa_name(isa), "amx", 3); }

static void draw_shapes(problem *p, int isa, int number) {
    static const int blocks[] = {16, 32, 64, 128};
    static const int widths[] = {1, 2, 7, 8, 16, 17, 33, 64, 65, 128};
    static const double scales[] = {0.4, 1, -0.3, 0};
    ringtile_call *c = &p->c;
    memset(p, 0, sizeof(*p));
    p->number = number, p->kind = number / 4 % 6;
    c->dtype = number % 4;
    if (has_tiles(isa) && c->dtype == RINGTILE_FLOAT32 && number / 4 % 2) c->dtype = RINGTILE_FLOAT32_PARTS;
    c->isa = isa, c->threads = 1 + (int)draw(2), c->block = blocks[draw(4)];
    p->wide = c->dtype == RINGTILE_FLOAT64 ? RINGTILE_FLOAT64 : RINGTILE_FLOAT32, p->words = (c->block + 31) / 32;
    p->ratio = 1 + draw(2);
    c->batch = 1 + draw(2), c->kv_heads = 1 + draw(2), c->heads = c->kv_heads * p->ratio, c->index.n_groups = 1 + draw(2);
    c->n_queries = 1 + draw(p->kind == 4 ? 90 : 200), c->n_keys = 1 + draw(220);
    c->index.start = draw(3) ? draw(150) : -(int64_t)draw(150);
    c->head_dim = widths[draw(10)], c->value_dim = widths[draw(10)];
    c->index.n_rows = floor_div(c->index.start + c->n_queries - 1, c->block) - floor_div(c->index.start, c->block) + 1;
    c->index.n_cols = (c->n_keys + c->block - 1) / c->block;
    c->options.scale = scales[draw(4)];
    p->drops = draw(3) == 0, c->options.dropout_threshold = p->drops ? 20000 : 0;
    c->options.seed = (int64_t)(((uint64_t)draw(1u << 31) << 33) ^ draw(1u << 31));
    c->index.group_stride[0] = c->heads, c->index.group_stride[1] = 1;
    c->index.group = p->group = allocate(c->batch * c->heads, 4);
    for (int64_t head = 0; head < c->batch * c->heads; head++)
        p->group[head] = (int32_t)((head % c->heads + head / c->heads) % c->index.n_groups);
}

// The tables of partial tiles. Their bits beyond the lengths have no meaning, so they are random.
static void draw_tiles(problem *p) {
    ringtile_call *c = &p->c;
    const int64_t slots = c->index.n_groups * c->index.n_rows * c->index.n_cols, block = c->block, words = p->words;
    const int64_t first_row = floor_div(c->index.start, block), square = block * words;
    int32_t *states = allocate(slots, 4), n_tiles = 0;  // -2 empty, -1 full, else the number of a partial tile
    uint32_t *bits = allocate(slots * square, 4), *bits_t = allocate(slots * square, 4);
    uint32_t *rows_any = allocate(slots * words, 4), *cols_any = allocate(slots * words, 4);
    for (int64_t slot = 0; slot < slots; slot++) {
        int64_t group = slot / (c->index.n_rows * c->index.n_cols), row = slot / c->index.n_cols % c->index.n_rows, col = slot % c->index.n_cols;
        int64_t kept = 0, all = 0;
        uint32_t *own = bits + n_tiles * square, *own_t = bits_t + n_tiles * square;
        uint32_t *row_any = rows_any + n_tiles * words, *col_any = cols_any + n_tiles * words;
        memset(own, 0, square * 4), memset(own_t, 0, square * 4);
        memset(row_any, 0, words * 4), memset(col_any, 0, words * 4);
        for (int64_t a = 0; a < block; a++)
            for (int64_t b = 0; b < block; b++) {
                int64_t i = (first_row + row) * block + a, j = col * block + b;
                int inside = i >= c->index.start && i < c->index.start + c->n_queries && j < c->n_keys;
                int keep = inside ? keeps(p->kind, group, i, j) : (int)draw(2);
                all += inside, kept += inside && keep;
                if (!keep) continue;
                own[a * words + b / 32] |= 1u << (b % 32), own_t[b * words + a / 32] |= 1u << (a % 32);
                row_any[a / 32] |= 1u << (a % 32), col_any[b / 32] |= 1u << (b % 32);
            }
        states[slot] = kept == 0 ? -2 : kept == all && draw(4) ? -1 : n_tiles++;
    }
    c->index.bits = exactly(bits, n_tiles * square, 4), c->index.bits_t = exactly(bits_t, n_tiles * square, 4);
    c->index.rows_any = exactly(rows_any, n_tiles * words, 4), c->index.cols_any = exactly(cols_any, n_tiles * words, 4);
    list full = new_list(c->index.n_rows, c->index.n_cols, c->index.n_groups, states, 1);
    list part = new_list(c->index.n_rows, c->index.n_cols, c->index.n_groups, states, 0);
    c->index.full_row_ptr = full.ptr, c->index.full_col = full.other, c->index.full_col_ptr = full.ptr_t, c->index.full_row = full.other_t;
    c->index.part_row_ptr = part.ptr, c->index.part_col = part.other, c->index.part_tile = part.tile;
    c->index.part_col_ptr = part.ptr_t, c->index.part_row = part.other_t, c->index.part_tile_t = part.tile_t;
    p->full = full, p->part = part;
}

static int64_t length_of(const problem *p, int columns, int64_t slot) {
    const int32_t *full = columns ? p->full.ptr_t : p->full.ptr, *part = columns ? p->part.ptr_t : p->part.ptr;
    return full[slot + 1] - full[slot] + part[slot + 1] - part[slot];
}

// Lists of more than two tiles are split.
static int32_t splits_of(const problem *p, int columns, int64_t slot) {
    int64_t length = length_of(p, columns, slot);
    return (int32_t)(length > 2 ? (length + 1) / 2 : 1);
}

static void make_forward_work(problem *p) {
    ringtile_call *c = &p->c;
    const int64_t slots = c->index.n_groups * c->index.n_rows;
    int32_t *work = allocate(slots * (c->index.n_cols + 1) * 5, 4);
    int64_t *work_begin = allocate(c->index.n_groups + 1, 8), *item_begin = allocate(c->batch * c->heads + 1, 8), entries = 0;
    for (int64_t slot = 0; slot < slots; slot++) {
        if (slot % c->index.n_rows == 0) work_begin[slot / c->index.n_rows] = entries;
        int64_t length = length_of(p, 0, slot);
        int32_t splits = splits_of(p, 0, slot);
        for (int32_t split = 0; split < splits; split++, entries++) {
            int32_t first = (int32_t)(length * split / splits), last = (int32_t)(length * (split + 1) / splits);
            int32_t entry[5] = {(int32_t)slot, first, last, splits > 1 ? (int32_t)c->forward.n_splits++ : -1, splits};
            memcpy(work + entries * 5, entry, sizeof(entry));
        }
    }
    work_begin[c->index.n_groups] = entries;
    item_begin[0] = 0;
    for (int64_t head = 0; head < c->batch * c->heads; head++)
        item_begin[head + 1] = item_begin[head] + work_begin[p->group[head] + 1] - work_begin[p->group[head]];
    c->forward.work = exactly(work, entries * 5, 4), c->forward.work_begin = work_begin, c->forward.item_begin = item_begin;
}

// The rows or columns that several threads share: about half of those that are split.
static void draw_shared_splits(problem *p, int columns) {
    const ringtile_call *c = &p->c;
    const int64_t places = columns ? c->index.n_cols : c->index.n_rows, own_heads = columns ? c->kv_heads : c->heads;
    const int64_t ratio = c->heads / own_heads;
    int64_t *entries = allocate(c->batch * c->heads * places * (c->index.n_rows + c->index.n_cols) * 4, 8), count = 0;
    for (int64_t item = 0; item < c->batch * own_heads * places; item++) {
        int64_t first_head = item / places * ratio;
        int is_split = 0;
        for (int64_t head = first_head; head < first_head + ratio; head++)
            is_split |= splits_of(p, columns, p->group[head] * places + item % places) > 1;
        if (!is_split || draw(2)) continue;
        for (int64_t head = first_head; head < first_head + ratio; head++) {
            int64_t slot = p->group[head] * places + item % places, length = length_of(p, columns, slot);
            int64_t splits = splits_of(p, columns, slot);
            for (int64_t split = 0; split < splits; split++) {
                int64_t entry[4] = {item, head, length * split / splits, length * (split + 1) / splits};
                memcpy(entries + 4 * count++, entry, sizeof(entry));
            }
        }
    }
    p->shared_splits[columns] = exactly(entries, count * 4, 8), p->n_shared_splits[columns] = count;
}

static void draw_backward_work(problem *p) {
    ringtile_call *c = &p->c;
    const int64_t rows = c->index.n_groups * c->index.n_rows, cols = c->index.n_groups * c->index.n_cols;
    int32_t *row_splits = allocate(rows, 4), *col_splits = allocate(cols, 4), *row_buffer = allocate(rows, 4);
    for (int64_t slot = 0; slot < cols; slot++) col_splits[slot] = splits_of(p, 1, slot);
    for (int64_t slot = 0; slot < rows; slot++) {
        row_splits[slot] = splits_of(p, 0, slot), row_buffer[slot] = (int32_t)(slot % c->index.n_rows);
        if (row_splits[slot] > 1 && slot % c->index.n_rows >= c->backward.n_row_buffers) c->backward.n_row_buffers = slot % c->index.n_rows + 1;
    }
    c->backward.row_splits = row_splits, c->backward.col_splits = col_splits, c->backward.row_buffer = row_buffer;
    c->backward.row_buffers = allocate(c->batch * c->heads * c->backward.n_row_buffers * c->head_dim * 128, sizes[p->wide]);
    for (int columns = 0; columns < 2; columns++) draw_shared_splits(p, columns);
}

// In some of the cases, the tiles, heads and batch elements are part of a larger problem.
static void draw_numbers(problem *p) {
    ringtile_call *c = &p->c;
    int32_t *row_at = allocate(c->index.n_rows, 4), *col_at = allocate(c->index.n_cols, 4);
    int64_t *head_at = allocate(c->heads, 8), *batch_at = allocate(c->batch, 8);
    for (int64_t i = 0; i < c->index.n_rows; i++) row_at[i] = (int32_t)draw(1 << 20);
    for (int64_t i = 0; i < c->index.n_cols; i++) col_at[i] = (int32_t)draw(1 << 20);
    for (int64_t i = 0; i < c->heads; i++) head_at[i] = draw(1 << 10);
    for (int64_t i = 0; i < c->batch; i++) batch_at[i] = draw(1u << 31);
    c->index.row_at = draw(2) ? row_at : NULL, c->index.col_at = draw(2) ? col_at : NULL;
    c->options.head_at = draw(2) ? head_at : NULL, c->options.batch_at = draw(2) ? batch_at : NULL;
}

// The number of a token in the whole problem. `first` is the number of its side's first tile.
static uint32_t position_of(const problem *p, const int32_t *at, int64_t first, int64_t token) {
    int64_t tile = floor_div(token, p->c.block);
    return (uint32_t)((at ? at[tile - first] : tile) * p->c.block + token - tile * p->c.block);
}

// True if dropout keeps a pair.
static int survives(const problem *p, int64_t b, int64_t h, int64_t a, int64_t j) {
    const ringtile_call *c = &p->c;
    uint32_t query = position_of(p, c->index.row_at, floor_div(c->index.start, c->block), c->index.start + a);
    uint32_t key = position_of(p, c->index.col_at, 0, j);
    uint32_t batch = (uint32_t)(c->options.batch_at ? c->options.batch_at[b] : b), head = (uint32_t)(c->options.head_at ? c->options.head_at[h] : h);
    return dropout_half((uint64_t)c->options.seed, batch, head, query, key) >= c->options.dropout_threshold;
}

// A key mask and key lengths, each in some of the cases, and the pairs that are kept.
static void draw_kept(problem *p) {
    ringtile_call *c = &p->c;
    const int masked = draw(3) == 0, bounded = draw(4) == 0;
    c->options.key_words = (c->n_keys + 31) / 32;
    uint32_t *key_bits = allocate(c->batch * c->options.key_words, 4);
    int64_t *key_lengths = allocate(c->batch, 8);
    for (int64_t i = 0; i < c->batch * c->options.key_words; i++) key_bits[i] = draw(1u << 31) * 2 + draw(2);
    for (int64_t b = 0; b < c->batch; b++) key_lengths[b] = draw((uint32_t)c->n_keys + 3);
    c->options.key_bits = masked ? (int32_t *)key_bits : NULL, c->options.key_lengths = bounded ? key_lengths : NULL;
    p->kept = allocate(c->batch * c->heads * c->n_queries * c->n_keys, 1);
    for (int64_t pair = 0; pair < c->batch * c->heads * c->n_queries * c->n_keys; pair++) {
        int64_t key = pair % c->n_keys, query = pair / c->n_keys % c->n_queries, head = pair / c->n_keys / c->n_queries;
        int64_t b = head / c->heads;
        p->kept[pair] = (char)(keeps(p->kind, p->group[head], c->index.start + query, key) &&
                               (!bounded || key < key_lengths[b]) &&
                               (!masked || key_bits[b * c->options.key_words + key / 32] >> (key % 32) & 1));
    }
}

static const char *kept_by(const problem *p, int64_t b, int64_t h, int64_t query) {
    return p->kept + ((b * p->c.heads + h) * p->c.n_queries + query) * p->c.n_keys;
}

static void fill(tensor *x, int64_t b, int64_t h, int64_t n, double value) {
    for (int64_t d = 0; d < x->width; d++) set(x, b, h, n, d, value);
}

// Inputs, with values that are not finite in the queries and keys that no pair keeps.
static void draw_inputs(problem *p) {
    ringtile_call *c = &p->c;
    p->q = new_tensor(c->dtype, c->batch, c->heads, c->n_queries, c->head_dim, 1);
    p->k = new_tensor(c->dtype, c->batch, c->kv_heads, c->n_keys, c->head_dim, 1);
    p->v = new_tensor(c->dtype, c->batch, c->kv_heads, c->n_keys, c->value_dim, 1);
    p->out = new_tensor(c->dtype, c->batch, c->heads, c->n_queries, c->value_dim, 0);
    p->out_grad = new_tensor(c->dtype, c->batch, c->heads, c->n_queries, c->value_dim, 1);
    char *key_used = memset(allocate(c->batch * c->kv_heads * c->n_keys, 1), 0, c->batch * c->kv_heads * c->n_keys);
    for (int64_t b = 0; b < c->batch; b++)
        for (int64_t h = 0; h < c->heads; h++)
            for (int64_t a = 0; a < c->n_queries; a++) {
                const char *kept = kept_by(p, b, h, a);
                char *used = key_used + (b * c->kv_heads + h / p->ratio) * c->n_keys;
                for (int64_t j = 0; j < c->n_keys; j++) used[j] |= kept[j];
                if (memchr(kept, 1, c->n_keys)) continue;
                fill(&p->q, b, h, a, NAN);
                fill(&p->out_grad, b, h, a, INFINITY);
            }
    for (int64_t b = 0; b < c->batch; b++)
        for (int64_t g = 0; g < c->kv_heads; g++)
            for (int64_t j = 0; j < c->n_keys; j++) {
                if (key_used[(b * c->kv_heads + g) * c->n_keys + j]) continue;
                fill(&p->k, b, g, j, NAN);
                fill(&p->v, b, g, j, -INFINITY);
            }
}

static void place(void *field, int64_t *stride, const tensor *x) {
    memcpy(field, &x->memory, sizeof(x->memory));
    memcpy(stride, x->stride, sizeof(x->stride));
}

static void make_gradients(problem *p, int by_columns) {
    ringtile_call *c = &p->c;
    const int64_t n_queries = c->batch * c->heads * c->n_queries, n_keys = c->batch * c->kv_heads * c->n_keys;
    const int64_t counts[] = {n_queries * c->head_dim, n_keys * c->head_dim, n_keys * c->value_dim};
    p->by_columns = by_columns;
    for (int i = 0; i < 3; i++) {
        int grows = i == 0 && by_columns;
        p->grad_counts[i] = counts[i], p->grad_types[i] = grows ? p->wide : c->dtype;
        p->grads[i] = allocate(counts[i], sizes[p->grad_types[i]]);
        for (int64_t j = 0; j < counts[i]; j++) put(p->grads[i], j, p->grad_types[i], grows ? 0 : NAN);
    }
    c->backward.q_grad = by_columns ? NULL : p->grads[0], c->backward.q_sums = by_columns ? p->grads[0] : NULL;
    c->backward.k_grad = p->grads[1], c->backward.v_grad = p->grads[2];
}

static void make_call(problem *p) {
    ringtile_call *c = &p->c;
    const int64_t n_lse = c->batch * c->heads * c->n_queries;
    place(&c->q, c->q_stride, &p->q), place(&c->k, c->k_stride, &p->k), place(&c->v, c->v_stride, &p->v);
    place(&c->out, c->out_stride, &p->out), place(&c->backward.out_grad, c->backward.out_grad_stride, &p->out_grad);
    c->lse = allocate(n_lse, sizes[p->wide]), c->backward.delta = allocate(2 * n_lse, sizes[p->wide]);
    if (p->number % 3 == 0) {
        void *lse_grad = allocate(n_lse, sizes[p->wide]);
        for (int64_t i = 0; i < n_lse; i++) put(lse_grad, i, p->wide, normal());
        c->backward.lse_grad = lse_grad;
    }
    make_gradients(p, (int)draw(2));
    c->work.times = draw(2) ? p->times : NULL;
}

static int compute_forward(problem *p) {
    ringtile_call *c = &p->c;
    const int64_t heads = c->batch * c->heads;
    c->work.scratch = allocate(heads * c->forward.n_splits * (c->value_dim + 2) * 128, sizes[p->wide]);
    c->work.last_item = c->forward.item_begin[heads];
    int failed = ringtile_forward(c);
    c->work.phase = RINGTILE_COMBINE;
    return failed | ringtile_forward(c);
}

static int compute_backward(problem *p) {
    ringtile_call *c = &p->c;
    const int64_t heads = c->batch * c->heads;
    c->work.first_col = 0;
    if (p->by_columns) {
        c->work.phase = RINGTILE_HEADS, c->work.last_item = c->batch * c->kv_heads, c->work.last_col = c->index.n_cols / 2;
        int failed = ringtile_backward(c);
        c->work.first_col = c->index.n_cols / 2, c->work.last_col = c->index.n_cols;
        return failed | ringtile_backward(c);
    }
    c->work.phase = RINGTILE_DELTA, c->work.last_item = heads;
    int failed = ringtile_backward(c);
    for (int columns = 0; columns < 2; columns++) {
        const int64_t count = p->n_shared_splits[columns];
        const int64_t width = (c->head_dim + 15) / 16 * 16 + (columns ? (c->value_dim + 15) / 16 * 16 : 0);
        c->backward.shared_splits = p->shared_splits[columns], c->backward.n_shared_splits = count;
        c->work.scratch = allocate(count * width * 128, sizes[p->wide]);
        c->work.phase = RINGTILE_ROWS + columns;
        c->work.last_item = count + c->batch * (columns ? c->kv_heads * c->index.n_cols : c->heads * c->index.n_rows);
        failed |= ringtile_backward(c);
        c->work.phase = RINGTILE_FOLD_ROWS + columns, c->work.last_item = count;
        failed |= ringtile_backward(c);
    }
    return failed;
}

// Softcap and ALiBi, each in some of the cases. Slopes are small where positions are far apart.
static void draw_transform(problem *p) {
    ringtile_call *c = &p->c;
    const double most = c->index.row_at || c->index.col_at ? 1e-8 : 0.05;
    p->scale = c->options.scale;
    if (!draw(3)) c->options.softcap = 1.5;
    if (!draw(3)) {
        c->options.slopes = p->slopes = allocate(c->heads, 8);
        for (int64_t h = 0; h < c->heads; h++) p->slopes[h] = most * (draw(1000) / 1000.0 - 0.2);
    }
    if (c->options.softcap > 0 || p->slopes) c->options.true_scale = p->scale, c->options.scale = 1;
}

// A bias in some of the cases: a table per head, if one thread has each, or a row per query whose places are all different.
static void draw_added(problem *p) {
    ringtile_call *c = &p->c;
    if (draw(3)) return;
    const int is_table = p->by_columns && draw(2);
    const int64_t rows = is_table ? 1 : c->n_queries, places = is_table ? 1 + draw(200) : c->n_keys + 9;
    int32_t *queries = allocate(c->n_queries, 4), *keys = allocate(c->n_keys, 4);
    for (int64_t a = 0; a < c->n_queries; a++) queries[a] = is_table ? (int32_t)(a - draw(50)) : -(int32_t)draw(9);
    for (int64_t j = 0; j < c->n_keys; j++) keys[j] = (int32_t)j;
    c->options.softcap = 0, c->options.slopes = p->slopes = NULL;
    c->options.true_scale = p->scale, c->options.scale = 1;
    p->added_count = c->batch * c->heads * rows * places;
    void *numbers = allocate(p->added_count, sizes[p->wide]), *grad = allocate(p->added_count, sizes[p->wide]);
    for (int64_t i = 0; i < p->added_count; i++) put(numbers, i, p->wide, normal()), put(grad, i, p->wide, 0);
    c->options.added = numbers, c->options.added_places = places, c->backward.added_grad = grad;
    c->options.added_queries = queries, c->options.added_keys = keys;
    const int64_t strides[] = {c->heads * rows * places, rows * places, is_table ? 0 : places};
    memcpy(c->options.added_stride, strides, sizeof(strides)), memcpy(c->backward.added_grad_stride, strides, sizeof(strides));
    // In some cases, batch elements share the numbers, but not their gradients.
    if (draw(2)) c->options.added_stride[0] = 0;
}

// The place of a pair in the row of a query in added numbers, from a head's first on.
static int64_t added_place(const ringtile_call *c, int64_t a, int64_t j) {
    const int64_t last = c->options.added_places - 1, place = c->options.added_keys[j] - c->options.added_queries[a];
    return c->options.added_stride[2] * a + (place < 0 ? 0 : place > last ? last : place);
}

// What softcap, ALiBi and a bias make of a product, and its derivative.
static double transformed(const problem *p, int64_t b, int64_t h, int64_t a, int64_t j, double product, double *factor) {
    const ringtile_call *c = &p->c;
    const double cap = c->options.softcap, t = cap > 0 ? tanh(product * p->scale / cap) : 0;
    const int32_t query = (int32_t)position_of(p, c->index.row_at, floor_div(c->index.start, c->block), c->index.start + a);
    *factor = p->scale * (1 - t * t);
    const int64_t head = b * c->options.added_stride[0] + h * c->options.added_stride[1];
    const double added = c->options.added ? get(c->options.added, head + added_place(c, a, j), p->wide) : 0;
    return added + (cap > 0 ? cap * t : product * p->scale) -
           (p->slopes ? p->slopes[h] * abs(query - (int32_t)position_of(p, c->index.col_at, 0, j)) : 0);
}

enum { OUTPUT, LSE, Q_GRAD, K_GRAD, V_GRAD, ADDED_GRAD, RESULTS };

// One query and head in double, pair by pair. `weight`, `share` and `factor` hold a value per key.
static void expect_row(const problem *p, int64_t b, int64_t h, int64_t a, double **wanted, double *weight,
                       double *share, double *factor) {
    const ringtile_call *c = &p->c;
    const int64_t g = h / p->ratio, at = (b * c->heads + h) * c->n_queries + a, D = c->head_dim, Dv = c->value_dim;
    const char *kept = kept_by(p, b, h, a);
    const double *query = row_of(&p->q, b, h, a), *gradient = row_of(&p->out_grad, b, h, a);
    double top = -INFINITY, total = 0, mean = 0;
    for (int64_t j = 0; j < c->n_keys; j++) {
        if (!kept[j]) continue;
        double product = 0;
        for (int64_t d = 0; d < D; d++) product += query[d] * row_of(&p->k, b, g, j)[d];
        weight[j] = transformed(p, b, h, a, j, product, factor + j);
        top = fmax(top, weight[j]);
    }
    for (int64_t j = 0; j < c->n_keys; j++)
        if (kept[j]) total += weight[j] = exp(weight[j] - top);
    wanted[LSE][at] = total > 0 ? top + log(total) : -INFINITY;
    for (int64_t j = 0; j < c->n_keys; j++) {
        if (!kept[j]) continue;
        weight[j] /= total;
        share[j] = 1;
        if (p->drops) share[j] = survives(p, b, h, a, j) ? 65536.0 / (65536 - c->options.dropout_threshold) : 0;
        const double *value = row_of(&p->v, b, g, j);
        double product = 0, *value_grad = wanted[V_GRAD] + ((b * c->kv_heads + g) * c->n_keys + j) * Dv;
        for (int64_t d = 0; d < Dv; d++) {
            wanted[OUTPUT][at * Dv + d] += weight[j] * share[j] * value[d];
            value_grad[d] += weight[j] * share[j] * gradient[d];
            product += gradient[d] * value[d];
        }
        share[j] *= product;
        mean += weight[j] * share[j];
    }
    if (c->backward.lse_grad) mean -= get(c->backward.lse_grad, at, p->wide);
    for (int64_t j = 0; j < c->n_keys; j++) {
        if (!kept[j]) continue;
        double slope = weight[j] * (share[j] - mean);
        const int64_t *stride = c->backward.added_grad_stride;
        if (c->options.added) wanted[ADDED_GRAD][b * stride[0] + h * stride[1] + added_place(c, a, j)] += slope;
        slope *= factor[j];
        double *key_grad = wanted[K_GRAD] + ((b * c->kv_heads + g) * c->n_keys + j) * D;
        for (int64_t d = 0; d < D; d++) {
            wanted[Q_GRAD][at * D + d] += slope * row_of(&p->k, b, g, j)[d];
            key_grad[d] += slope * query[d];
        }
    }
}

static int check(const problem *p) {
    static const char *names[RESULTS] = {"out", "lse", "q_grad", "k_grad", "v_grad", "added_grad"};
    static const double bounds[] = {2e-5, 1e-12, 3e-2, 4e-3, 1e-4};
    const ringtile_call *c = &p->c;
    const int64_t n_lse = c->batch * c->heads * c->n_queries;
    const int64_t *n = p->grad_counts, counts[RESULTS] = {n_lse * c->value_dim, n_lse, n[0], n[1], n[2], p->added_count};
    double *wanted[RESULTS], *found[RESULTS], *weight = allocate(c->n_keys, 8), *share = allocate(c->n_keys, 8);
    double *factor = allocate(c->n_keys, 8);
    for (int i = 0; i < RESULTS; i++) {
        wanted[i] = memset(allocate(counts[i], 8), 0, counts[i] * 8), found[i] = allocate(counts[i], 8);
        for (int64_t j = 0; i >= Q_GRAD && i < ADDED_GRAD && j < counts[i]; j++)
            found[i][j] = get(p->grads[i - Q_GRAD], j, p->grad_types[i - Q_GRAD]);
        for (int64_t j = 0; i == ADDED_GRAD && j < counts[i]; j++) found[i][j] = get(c->backward.added_grad, j, p->wide);
    }
    for (int64_t at = 0; at < n_lse; at++) {
        int64_t a = at % c->n_queries, h = at / c->n_queries % c->heads, b = at / c->n_queries / c->heads;
        expect_row(p, b, h, a, wanted, weight, share, factor);
        for (int64_t d = 0; d < c->value_dim; d++)
            found[OUTPUT][at * c->value_dim + d] = get(c->out, place_of(&p->out, b, h, a) + d, c->dtype);
        found[LSE][at] = get(c->lse, at, p->wide);
    }
    int failed = 0;
    for (int i = 0; i < RESULTS; i++) {
        int exact = i == LSE && c->dtype != RINGTILE_FLOAT32_PARTS;
        double bound = bounds[exact ? p->wide : c->dtype] * (p->drops ? 2 : 1);
        failed |= wrong(names[i], found[i], wanted[i], counts[i], bound);
    }
    int64_t packing = p->times[0], working = p->times[1];
    if (c->work.times ? packing < 0 || working < packing : working != 0) failed = 1, printf("times\n");
    return failed;
}

// Masses of segments, over problems of their own: rows that see nothing, groups of any size and empty ones, hidden keys.
static int check_masses(int isa, int number) {
    static const int types[] = {RINGTILE_FLOAT32, RINGTILE_BFLOAT16, RINGTILE_FLOAT16};
    static const int widths[] = {1, 2, 7, 16, 33, 64}, lengths[] = {1, 2, 5, 16, 128, 150};
    static const double scales[] = {0.4, -0.3, 0};
    ringtile_call c = {0};
    const int64_t ratio = 1 + draw(2), width = widths[draw(6)];
    c.isa = isa, c.dtype = types[number % 3], c.threads = 1 + (int)draw(2), c.masses.by_sign = (int)draw(2);
    c.batch = 1 + draw(2), c.kv_heads = 1 + draw(2), c.heads = c.kv_heads * ratio;
    c.masses.pool_max = (int)draw(2);
    c.n_queries = 1 + draw(300), c.n_keys = 1 + draw(400), c.head_dim = width * (1 + c.masses.by_sign);
    c.masses.segment = lengths[draw(6)], c.masses.n_pooled = 1 + draw(9), c.masses.pooled_step = 1 + draw(3), c.options.scale = scales[draw(3)];
    if (c.masses.segment > c.n_keys) c.masses.segment = c.n_keys;
    const int64_t n_segments = (c.n_keys + c.masses.segment - 1) / c.masses.segment, count = c.batch * c.heads * c.masses.n_pooled * n_segments;
    tensor q = new_tensor(c.dtype, c.batch, c.heads, c.n_queries, width, 1);
    tensor k = new_tensor(c.dtype, c.batch, c.kv_heads, c.n_keys, c.head_dim, 1);
    place(&c.q, c.q_stride, &q), place(&c.k, c.k_stride, &k), place(&c.v, c.v_stride, &k);
    int64_t *seen = allocate(c.n_queries, 8), most = 0;
    for (int64_t m = 0; m < c.n_queries; m++) {
        seen[m] = number % 2 ? m * c.n_keys / c.n_queries : (int64_t)draw((uint32_t)c.n_keys + 4) - 2;
        if (seen[m] > most) most = seen[m];
    }
    int32_t *begin = allocate(c.masses.n_pooled + 1, 4);
    for (int64_t r = 0; r <= c.masses.n_pooled; r++) begin[r] = (int32_t)(r * c.n_queries / c.masses.n_pooled);
    if (c.masses.n_pooled > 2 && draw(2)) begin[1] = begin[2];
    float *bias = allocate(c.batch * c.n_keys, 4);
    const int has_bias = (int)draw(2);
    for (int64_t i = 0; i < c.batch * c.n_keys; i++) bias[i] = draw(4) ? (float)normal() : -INFINITY;
    for (int64_t b = 0; b < c.batch; b++)
        for (int64_t g = 0; g < c.kv_heads; g++)
            for (int64_t j = 0; j < c.n_keys; j++)
                if (j >= most || (has_bias && isinf(bias[b * c.n_keys + j]))) fill(&k, b, g, j, NAN);
    c.masses.bias = has_bias ? bias : NULL, c.masses.bias_stride[0] = c.n_keys, c.masses.seen = seen, c.masses.pool_begin = begin;
    c.index.group = memset(allocate(1, 4), 0, 4), c.masses.sums = allocate(count, 4);
    const int64_t items = c.batch * c.heads * ((c.masses.n_pooled + c.masses.pooled_step - 1) / c.masses.pooled_step);
    c.work.last_item = items / 2;
    int failed = ringtile_masses(&c);
    c.work.first_item = items / 2, c.work.last_item = items;
    failed |= ringtile_masses(&c);
    double *wanted = memset(allocate(count, 8), 0, count * 8), *found = allocate(count, 8), *weight = allocate(c.n_keys, 8);
    for (int64_t at = 0; at < count; at++) found[at] = c.masses.sums[at];
    for (int64_t row = 0; row < c.batch * c.heads * c.masses.n_pooled; row++) {
        const int64_t r = row % c.masses.n_pooled, h = row / c.masses.n_pooled % c.heads, b = row / c.masses.n_pooled / c.heads;
        double counted = 0, *masses = wanted + row * n_segments;
        for (int64_t m = begin[r]; m < begin[r + 1]; m++) {
            double top = -INFINITY, total = 0;
            const double *query = row_of(&q, b, h, m);
            for (int64_t j = 0; j < c.n_keys && j < seen[m]; j++) {
                const double *key = row_of(&k, b, h / ratio, j);
                weight[j] = has_bias ? bias[b * c.n_keys + j] : 0;
                for (int64_t d = 0; d < width; d++)
                    weight[j] += c.options.scale * (c.masses.by_sign ? fmax(query[d], 0) * key[d] + fmax(-query[d], 0) * key[width + d]
                                                      : query[d] * key[d]);
                if (has_bias && isinf(bias[b * c.n_keys + j])) weight[j] = -INFINITY;
                top = fmax(top, weight[j]);
            }
            for (int64_t j = 0; j < c.n_keys && j < seen[m] && !isinf(top); j++) total += exp(weight[j] - top);
            counted += total > 0;
            for (int64_t s = 0; s < n_segments && total > 0; s++) {
                double mass = 0;
                for (int64_t j = s * c.masses.segment; j < (s + 1) * c.masses.segment && j < c.n_keys && j < seen[m]; j++)
                    mass += exp(weight[j] - top) / total;
                masses[s] = c.masses.pool_max ? fmax(masses[s], mass) : masses[s] + mass;
            }
        }
        for (int64_t s = 0; s < n_segments && !c.masses.pool_max && counted > 0; s++)
            masses[s] /= counted;
    }
    failed |= wrong("masses", found, wanted, count, 2e-5);
    if (failed)
        printf("%s masses %d: dtype %d, H %d / %d, %d queries, %d keys, D %d, segment %d, %d rows\n",
               ringtile_isa_name(isa), number, c.dtype, (int)c.heads, (int)c.kv_heads, (int)c.n_queries, (int)c.n_keys,
               (int)c.head_dim, (int)c.masses.segment, (int)c.masses.n_pooled);
    while (n_allocations) free(allocations[--n_allocations]);
    return failed;
}

// 2^x of which the mantissa grows linearly.
static double rough_exp2(double x) {
    if (x < -1000) return 0;
    x -= 361024 / 8388608.0;
    return ldexp(1 + x - floor(x), (int)floor(x));
}

// Masses of rounded queries and keys, of exact allocations: a read past the last key is one past a tensor.
static int check_rounded(int isa, int number) {
    static const int widths[] = {4, 8, 36, 64}, lengths[] = {1, 3, 8, 16, 40, 128};
    ringtile_call c = {0};
    const int64_t ratio = 1 + draw(2);
    c.isa = isa, c.dtype = RINGTILE_INT8, c.threads = 1 + (int)draw(2), c.batch = 1 + draw(2), c.kv_heads = 1 + draw(2);
    c.heads = c.kv_heads * ratio, c.n_queries = 1 + draw(100), c.n_keys = 1 + draw(200), c.head_dim = widths[draw(4)];
    c.masses.segment = lengths[draw(6)], c.masses.n_pooled = 1 + draw(9), c.masses.pooled_step = 1 + draw(3);
    const int64_t n_segments = (c.n_keys + c.masses.segment - 1) / c.masses.segment, count = c.batch * c.heads * c.masses.n_pooled * n_segments;
    const int64_t rows = c.batch * c.heads * c.n_queries, keys = c.batch * c.kv_heads * c.n_keys;
    int8_t *q = allocate(rows * c.head_dim, 1), *k = allocate(keys * c.head_dim, 1);
    float *query_scale = allocate(rows, 4), *key_scale = allocate(keys, 4), *bias = allocate(c.batch * c.n_keys, 4);
    int32_t *sum = allocate(keys, 4), *begin = allocate(c.masses.n_pooled + 1, 4);
    int64_t *seen = allocate(c.n_queries, 8);
    for (int64_t i = 0; i < rows * c.head_dim; i++) q[i] = (int8_t)((int)draw(255) - 127);
    for (int64_t i = 0; i < rows; i++) query_scale[i] = 1e-3f * (float)draw(4);
    for (int64_t i = 0; i < keys; i++) {
        sum[i] = 0, key_scale[i] = draw(40) ? 0.01f * (float)(1 + draw(9)) : INFINITY;
        for (int64_t d = 0; d < c.head_dim; d++) sum[i] += k[i * c.head_dim + d] = (int8_t)((int)draw(255) - 127);
    }
    for (int64_t i = 0; i < c.batch * c.n_keys; i++) bias[i] = draw(3) ? 0 : -INFINITY;
    for (int64_t m = 0; m < c.n_queries; m++) seen[m] = number % 2 ? m * c.n_keys / c.n_queries : (int64_t)draw((uint32_t)c.n_keys + 4) - 2;
    for (int64_t r = 0; r <= c.masses.n_pooled; r++) begin[r] = (int32_t)(r * c.n_queries / c.masses.n_pooled);
    c.q = (const ringtile_number *)q, c.k = c.v = (const ringtile_number *)k;
    c.q_stride[2] = c.k_stride[2] = c.head_dim, c.q_stride[1] = c.n_queries * c.head_dim, c.k_stride[1] = c.n_keys * c.head_dim;
    c.q_stride[0] = c.heads * c.q_stride[1], c.k_stride[0] = c.kv_heads * c.k_stride[1];
    const int has_bias = (int)draw(2);
    c.masses.bias = has_bias ? bias : NULL, c.masses.bias_stride[0] = c.n_keys, c.masses.seen = seen, c.masses.pool_begin = begin;
    c.masses.query_scale = query_scale, c.masses.key_scale = key_scale, c.masses.key_sum = sum;
    c.index.group = memset(allocate(1, 4), 0, 4), c.masses.sums = allocate(count, 4);
    c.work.last_item = c.batch * c.heads * ((c.masses.n_pooled + c.masses.pooled_step - 1) / c.masses.pooled_step);
    int failed = ringtile_masses(&c);
    double *wanted = memset(allocate(count, 8), 0, count * 8), *found = allocate(count, 8), *weight = allocate(n_segments, 8);
    double *score = allocate(c.n_keys, 8);
    for (int64_t at = 0; at < count; at++) found[at] = c.masses.sums[at];
    for (int64_t row = 0; row < c.batch * c.heads * c.masses.n_pooled; row++) {
        const int64_t r = row % c.masses.n_pooled, h = row / c.masses.n_pooled % c.heads, b = row / c.masses.n_pooled / c.heads;
        double counted = 0, *masses = wanted + row * n_segments;
        for (int64_t m = begin[r]; m < begin[r + 1]; m++) {
            double top = -INFINITY, total = 0;
            const int64_t query = (b * c.heads + h) * c.n_queries + m, first = (b * c.kv_heads + h / ratio) * c.n_keys;
            memset(weight, 0, n_segments * 8);
            for (int64_t j = 0; j < c.n_keys && j < seen[m]; j++) {
                double product = 0;
                for (int64_t d = 0; d < c.head_dim; d++) product += q[query * c.head_dim + d] * k[(first + j) * c.head_dim + d];
                score[j] = isinf(key_scale[first + j]) ? INFINITY : product * key_scale[first + j] * query_scale[query];
                if (has_bias && isinf(bias[b * c.n_keys + j])) score[j] = -INFINITY;
                top = fmax(top, score[j]);
            }
            for (int64_t j = 0; j < c.n_keys && j < seen[m] && !isinf(top); j++)
                weight[j / c.masses.segment] += rough_exp2(score[j] - ceil(top)), total += rough_exp2(score[j] - ceil(top));
            counted += total > 0;
            for (int64_t s = 0; s < n_segments && total > 0; s++) masses[s] += weight[s] / total * weight[s] / total;
        }
        for (int64_t s = 0; s < n_segments && counted > 0; s++) masses[s] = sqrt(masses[s] / counted);
    }
    failed |= wrong("rounded masses", found, wanted, count, 1e-5);
    if (failed)
        printf("%s rounded %d: H %d / %d, %d queries, %d keys, D %d, segment %d, %d rows\n", ringtile_isa_name(isa), number,
               (int)c.heads, (int)c.kv_heads, (int)c.n_queries, (int)c.n_keys, (int)c.head_dim, (int)c.masses.segment, (int)c.masses.n_pooled);
    while (n_allocations) free(allocations[--n_allocations]);
    return failed;
}

// Scores of rounded queries and keys, summed over heads, with rows that are longer than their keys.
static int check_scores(int isa, int number) {
    static const int widths[] = {4, 8, 36, 64};
    ringtile_call c = {0};
    c.isa = isa, c.threads = 1 + (int)draw(2), c.batch = c.kv_heads = 1, c.heads = 1 + draw(4), c.masses.relu = draw(2);
    c.n_queries = 1 + draw(100), c.n_keys = 1 + draw(number % 4 ? 100 : 2200), c.head_dim = widths[draw(4)];
    c.out_stride[2] = c.n_keys + draw(3);
    const int64_t rows = c.heads * c.n_queries, count = c.n_queries * c.n_keys;
    int8_t *q = allocate(rows * c.head_dim, 1), *k = allocate(c.n_keys * c.head_dim, 1);
    float *query_scale = allocate(rows, 4), *key_scale = allocate(c.n_keys, 4);
    float *out = allocate((c.n_queries - 1) * c.out_stride[2] + c.n_keys, 4);
    int32_t *sum = allocate(c.n_keys, 4);
    for (int64_t i = 0; i < rows * c.head_dim; i++) q[i] = (int8_t)((int)draw(255) - 127);
    for (int64_t i = 0; i < rows; i++) query_scale[i] = draw(20) ? 1e-3f * (float)((int)draw(9) - 4) : NAN;
    for (int64_t i = 0; i < c.n_keys; i++) {
        sum[i] = 0, key_scale[i] = draw(40) ? 0.01f * (float)(1 + draw(9)) : NAN;
        for (int64_t d = 0; d < c.head_dim; d++) sum[i] += k[i * c.head_dim + d] = (int8_t)((int)draw(255) - 127);
    }
    for (int64_t i = 0; i < (c.n_queries - 1) * c.out_stride[2] + c.n_keys; i++) out[i] = 7;
    c.q = (const ringtile_number *)q, c.k = (const ringtile_number *)k, c.masses.sums = out;
    c.q_stride[2] = c.k_stride[2] = c.head_dim, c.q_stride[1] = c.n_queries * c.head_dim;
    c.masses.query_scale = query_scale, c.masses.key_scale = key_scale, c.masses.key_sum = sum;
    c.work.last_item = ((c.n_queries + 31) / 32) * ((c.n_keys + 1023) / 1024);
    int failed = ringtile_scores(&c);
    double *wanted = memset(allocate(count, 8), 0, count * 8), *found = allocate(count, 8);
    for (int64_t at = 0; at < count; at++) {
        const int64_t i = at / c.n_keys, j = at % c.n_keys;
        for (int64_t h = 0; h < c.heads; h++) {
            const int8_t *query = q + (h * c.n_queries + i) * c.head_dim;
            double product = 0;
            for (int64_t d = 0; d < c.head_dim; d++) product += query[d] * k[j * c.head_dim + d];
            wanted[at] += (c.masses.relu && product < 0 ? 0 : product) * query_scale[h * c.n_queries + i];
        }
        wanted[at] *= key_scale[j], found[at] = out[i * c.out_stride[2] + j];
        // Only NaNs are NaNs, and what is behind a row stays as it is.
        failed |= isnan(wanted[at]) != isnan(found[at]);
        if (isnan(wanted[at])) wanted[at] = found[at] = 0;
        for (int64_t d = c.n_keys; i + 1 < c.n_queries && d < c.out_stride[2]; d++) failed |= out[i * c.out_stride[2] + d] != 7;
    }
    failed |= wrong("rounded scores", found, wanted, count, 1e-5);
    if (failed)
        printf("%s scores %d: H %d, %d queries, %d keys, D %d\n", ringtile_isa_name(isa), number, (int)c.heads, (int)c.n_queries,
               (int)c.n_keys, (int)c.head_dim);
    while (n_allocations) free(allocations[--n_allocations]);
    return failed;
}

// Lists of keys per query, over problems of their own: empty lists, tails, limits that cut blocks, tokens that are NaN
// where no query keeps them, and queries whose weights wait in windows.
static int check_lists(int isa, int number) {
    static const int types[] = {RINGTILE_FLOAT32, RINGTILE_BFLOAT16, RINGTILE_FLOAT16};
    static const int widths[] = {1, 7, 16, 33, 64, 80}, blocks[] = {1, 1, 4, 64}, ratios[] = {1, 3, 6, 16, 70};
    static const double scales[] = {0.4, -0.3, 0}, bounds[] = {2e-5, 0, 3e-2, 4e-3};
    ringtile_call c = {0};
    const int64_t ratio = ratios[draw(5)];
    c.isa = isa, c.dtype = types[number % 3], c.threads = 1 + (int)draw(2), c.block = blocks[draw(4)];
    c.batch = 1 + draw(2), c.kv_heads = 1 + draw(2), c.heads = c.kv_heads * ratio, c.options.scale = scales[draw(3)];
    c.n_queries = 1 + draw(draw(6) ? 9 : 400), c.n_keys = 1 + draw(200), c.head_dim = widths[draw(6)], c.value_dim = widths[draw(6)];
    c.lists.list_groups = draw(2) ? c.kv_heads : 1, c.lists.list_rows = 16 + draw(80), c.lists.run = ratio > 8 ? 1 : 1 + draw(16 / (uint32_t)ratio), c.lists.chunk_keys = 1 + draw(150);
    c.lists.item_runs = c.lists.run == 1 ? 1 : 1 + draw(2), c.lists.union_cost = 1 + draw(3);
    const int64_t blocks_of_keys = (c.n_keys + c.block - 1) / c.block, n_rows = c.batch * c.heads * c.n_queries;
    const int64_t length = c.lists.list_length = 1 + draw((uint32_t)blocks_of_keys + 2), slots = c.batch * c.lists.list_groups * c.n_queries;
    int32_t *indices = allocate(slots * length, 4), *limits = allocate(c.batch * c.n_queries * 2, 4);
    for (int64_t slot = 0; slot < slots; slot++) {
        int64_t at = 0, left = blocks_of_keys;
        for (int32_t e = 0; at < length && e < blocks_of_keys && slot % 5 != 4; e++, left--)
            if (draw((uint32_t)left) < length - at) indices[slot * length + at++] = e;
        while (at < length) indices[slot * length + at++] = -1;
        // About half of the queries list what the one before does.
        if (slot % c.n_queries && draw(2)) memcpy(indices + slot * length, indices + (slot - 1) * length, length * 4);
    }
    for (int64_t i = 0; i < c.batch * c.n_queries; i++)
        limits[2 * i] = (int32_t)draw((uint32_t)c.n_keys) / 2, limits[2 * i + 1] = (int32_t)draw((uint32_t)c.n_keys + 1);
    c.lists.indices = indices, c.lists.indices_stride = c.lists.list_groups * c.n_queries * length;
    c.lists.limits = limits, c.lists.limits_stride = 2 * c.n_queries;
    tensor q = new_tensor(c.dtype, c.batch, c.heads, c.n_queries, c.head_dim, 1);
    tensor k = new_tensor(c.dtype, c.batch, c.kv_heads, c.n_keys, c.head_dim, 1);
    tensor v = new_tensor(c.dtype, c.batch, c.kv_heads, c.n_keys, c.value_dim, 1);
    tensor out = new_tensor(c.dtype, c.batch, c.heads, c.n_queries, c.value_dim, 0);
    tensor out_grad = new_tensor(c.dtype, c.batch, c.heads, c.n_queries, c.value_dim, 1);
    char *kept = memset(allocate(n_rows * c.n_keys, 1), 0, n_rows * c.n_keys), *used = memset(allocate(c.batch * c.kv_heads * c.n_keys, 1), 0, c.batch * c.kv_heads * c.n_keys);
    for (int64_t row = 0; row < n_rows; row++) {
        const int64_t i = row % c.n_queries, h = row / c.n_queries % c.heads, b = row / c.n_queries / c.heads, kv = h / ratio;
        const int32_t *list = indices + ((b * c.lists.list_groups + h * c.lists.list_groups / c.heads) * c.n_queries + i) * length;
        for (int64_t at = 0; at < length && list[at] >= 0; at++)
            for (int64_t j = (int64_t)list[at] * c.block; j < ((int64_t)list[at] + 1) * c.block && j < c.n_keys; j++)
                if (j >= limits[2 * (b * c.n_queries + i)] && j < limits[2 * (b * c.n_queries + i) + 1])
                    kept[row * c.n_keys + j] = used[(b * c.kv_heads + kv) * c.n_keys + j] = 1;
    }
    for (int64_t at = 0; at < c.batch * c.kv_heads * c.n_keys; at++) {
        if (used[at]) continue;
        fill(&k, at / c.n_keys / c.kv_heads, at / c.n_keys % c.kv_heads, at % c.n_keys, NAN);
        fill(&v, at / c.n_keys / c.kv_heads, at / c.n_keys % c.kv_heads, at % c.n_keys, INFINITY);
    }
    place(&c.q, c.q_stride, &q), place(&c.k, c.k_stride, &k), place(&c.v, c.v_stride, &v);
    place(&c.out, c.out_stride, &out), place(&c.backward.out_grad, c.backward.out_grad_stride, &out_grad);
    const int64_t n_keys = c.batch * c.kv_heads * c.n_keys;
    const int64_t counts[RESULTS] = {n_rows * c.value_dim, n_rows, n_rows * c.head_dim, n_keys * c.head_dim, n_keys * c.value_dim};
    float *lse = allocate(n_rows, 4), *lse_grad = allocate(n_rows, 4), *k_grad = allocate(counts[K_GRAD], 4), *v_grad = allocate(counts[V_GRAD], 4);
    for (int64_t row = 0; row < n_rows; row++) lse_grad[row] = (float)normal();
    memset(k_grad, 0, counts[K_GRAD] * 4), memset(v_grad, 0, counts[V_GRAD] * 4);
    c.lse = (ringtile_sum *)lse, c.backward.lse_grad = draw(2) ? (const ringtile_sum *)lse_grad : NULL;
    c.backward.q_grad = allocate(counts[Q_GRAD], sizes[c.dtype]), c.lists.key_sums = k_grad, c.lists.value_sums = v_grad;
    const int64_t parts = (ratio + c.lists.list_rows - 1) / c.lists.list_rows, runs = (c.n_queries + c.lists.run - 1) / c.lists.run;
    const int64_t window = 1 + draw((uint32_t)runs), lists_of_runs = c.batch * c.lists.list_groups * runs;
    c.lists.union_room = 1 + draw((uint32_t)blocks_of_keys);
    c.lists.union_entries = allocate(lists_of_runs * c.lists.union_room, 4), c.lists.union_bits = allocate(lists_of_runs * c.lists.union_room, 2);
    c.lists.union_length = allocate(lists_of_runs, 8), c.work.last_item = c.lists.run > 1 ? lists_of_runs : 0;
    int failed = ringtile_lists(&c);
    c.work.phase = RINGTILE_LISTS_FORWARD, c.lists.last_run = runs, c.work.last_item = c.batch * c.kv_heads * parts * ((runs + c.lists.item_runs - 1) / c.lists.item_runs);
    failed |= ringtile_lists(&c);
    c.lists.weights_room = 2 * c.lists.run * (length > c.lists.union_room ? length : c.lists.union_room) * c.block * ratio;
    const int64_t together = 1 + draw((uint32_t)(c.batch * c.kv_heads));
    c.lists.weights = allocate(together * window * c.lists.weights_room, 4);
    for (; c.lists.first_head < c.batch * c.kv_heads; c.lists.first_head += together)
        for (int64_t first = 0; first < runs; first = c.lists.last_run) {
            const int64_t left = c.batch * c.kv_heads - c.lists.first_head, heads = left < together ? left : together;
            c.lists.first_run = first, c.lists.last_run = first + window < runs ? first + window : runs;
            c.work.phase = RINGTILE_LISTS_QUERY_GRADS;
            c.work.last_item = heads * parts * ((c.lists.last_run - first + c.lists.item_runs - 1) / c.lists.item_runs);
            failed |= ringtile_lists(&c);
            c.work.phase = RINGTILE_LISTS_KEY_GRADS;
            c.work.last_item = heads * ((c.n_keys + c.lists.chunk_keys - 1) / c.lists.chunk_keys);
            failed |= ringtile_lists(&c);
        }
    problem p = {0};
    p.c = c, p.c.dtype = c.dtype, p.wide = RINGTILE_FLOAT32, p.ratio = ratio, p.kept = kept;
    p.q = q, p.k = k, p.v = v, p.out = out, p.out_grad = out_grad, p.scale = c.options.scale;
    const void *grads[] = {c.backward.q_grad, k_grad, v_grad};
    double *wanted[RESULTS], *found[RESULTS], *weight = allocate(c.n_keys, 8), *share = allocate(c.n_keys, 8);
    double *factor = allocate(c.n_keys, 8);
    for (int i = 0; i < RESULTS; i++) {
        wanted[i] = memset(allocate(counts[i], 8), 0, counts[i] * 8), found[i] = allocate(counts[i], 8);
        for (int64_t j = 0; i >= Q_GRAD && j < counts[i]; j++)
            found[i][j] = get(grads[i - Q_GRAD], j, i == Q_GRAD ? c.dtype : RINGTILE_FLOAT32);
    }
    for (int64_t row = 0; row < n_rows; row++) {
        const int64_t i = row % c.n_queries, h = row / c.n_queries % c.heads, b = row / c.n_queries / c.heads;
        expect_row(&p, b, h, i, wanted, weight, share, factor);
        for (int64_t d = 0; d < c.value_dim; d++)
            found[OUTPUT][row * c.value_dim + d] = get(c.out, place_of(&out, b, h, i) + d, c.dtype);
        found[LSE][row] = lse[row];
    }
    static const char *names[RESULTS] = {"out", "lse", "q_grad", "k_grad", "v_grad"};
    for (int i = 0; i < RESULTS; i++) failed |= wrong(names[i], found[i], wanted[i], counts[i], bounds[i == LSE ? 0 : c.dtype]);
    if (failed)
        printf("%s lists %d: dtype %d, block %d, B %d, H %d / %d, %d groups, %d queries, %d keys, D %d, Dv %d\n",
               ringtile_isa_name(isa), number, c.dtype, c.block, (int)c.batch, (int)c.heads, (int)c.kv_heads,
               (int)c.lists.list_groups, (int)c.n_queries, (int)c.n_keys, (int)c.head_dim, (int)c.value_dim);
    while (n_allocations) free(allocations[--n_allocations]);
    return failed;
}

// Lists of partial tiles under a mask of one byte for a batch element, slot and tile, for every capacity.
static int check_kept(void) {
    enum { GROUPS = 4, HEADS = 2, SLOTS = 3, OTHERS = 5 };
    int32_t base[GROUPS], pointer[2 * SLOTS + 1] = {0}, others[2 * SLOTS * OTHERS];
    uint8_t mask[GROUPS / HEADS * SLOTS * OTHERS];
    const int64_t strides[4] = {SLOTS * OTHERS, 0, 1, SLOTS};
    for (int i = 0; i < GROUPS; i++) base[i] = (int32_t)draw(2);
    for (int i = 0; i < (int)sizeof(mask); i++) mask[i] = (uint8_t)draw(2);
    for (int slot = 0; slot < 2 * SLOTS; slot++) {
        pointer[slot + 1] = pointer[slot];
        for (int32_t i = 0; i < OTHERS; i++)
            if (draw(2)) others[pointer[slot + 1]++] = i;
    }
    int64_t length = pointer[2 * SLOTS], total = 0, failed = 0;
    int32_t *list = exactly(others, length, 4), *begins = exactly(pointer, 2 * SLOTS + 1, 4), *groups = exactly(base, GROUPS, 4);
    uint8_t *keep = exactly(mask, sizeof(mask), 1);
    int32_t wanted[GROUPS * SLOTS * OTHERS], ends[GROUPS * SLOTS + 1] = {0};
    for (int slot = 0; slot < GROUPS * SLOTS; slot++) {
        int first = base[slot / SLOTS] * SLOTS + slot % SLOTS;
        for (int i = pointer[first]; i < pointer[first + 1]; i++)
            if (mask[slot / SLOTS / HEADS * SLOTS * OTHERS + slot % SLOTS + others[i] * SLOTS]) wanted[total++] = i;
        ends[slot + 1] = (int32_t)total;
    }
    // Below 0: tiles are only counted.
    const int64_t capacities[] = {-1, 0, 1, total - 1, total, total + 2};
    for (int i = 0; i < 6; i++) {
        int64_t capacity = capacities[i], room = capacity < 0 ? 0 : capacity;
        int32_t *kept = allocate(room, 4), *tiles = allocate(room, 4), *found = allocate(GROUPS * SLOTS + 1, 4);
        // The place in the list stands for the tile.
        int32_t *numbers = allocate(length, 4);
        for (int32_t place = 0; place < length; place++) numbers[place] = place;
        failed |= total != ringtile_kept(GROUPS, HEADS, SLOTS, groups, begins, list, numbers, keep, strides, room, found,
                                         capacity < 0 ? NULL : kept, capacity < 0 ? NULL : tiles);
        failed |= memcmp(found, ends, sizeof(ends));
        for (int64_t at = 0; at < room; at++)
            failed |= at < total ? kept[at] != others[wanted[at]] || tiles[at] != wanted[at] : kept[at] || tiles[at];
    }
    if (failed) printf("kept tiles: wrong\n");
    while (n_allocations) free(allocations[--n_allocations]);
    return failed != 0;
}

// Lists in any order, with numbers twice and numbers that do not exist, for counts around whole words.
static int check_ascending(void) {
    enum { ROWS = 5, LENGTH = 40 };
    int failed = 0;
    for (int32_t count = 0; count < 200; count += count < 60 || count > 70 ? 7 : 1) {
        int32_t lists[ROWS * LENGTH], *found = allocate(ROWS * LENGTH, 4);
        uint64_t *bits = memset(allocate(count / 64 + 1, 8), 0, (count / 64 + 1) * 8);
        for (int i = 0; i < ROWS * LENGTH; i++) lists[i] = draw(9) ? (int32_t)draw(count + 2) - 1 : (int32_t)draw(2) * INT32_MIN;
        ringtile_ascending(ROWS, LENGTH, count, exactly(lists, ROWS * LENGTH, 4), bits, found);
        for (int row = 0; row < ROWS; row++, found += LENGTH) {
            int length = 0;
            for (int32_t j = 0; j < count; j++) {
                int listed = 0;
                for (int i = 0; i < LENGTH; i++) listed |= lists[row * LENGTH + i] == j;
                if (listed) failed |= found[length++] != j;
            }
            while (length < LENGTH) failed |= found[length++] != -1;
        }
        for (int word = 0; word <= count / 64; word++) failed |= bits[word] != 0;
        while (n_allocations) free(allocations[--n_allocations]);
    }
    if (failed) printf("ascending lists: wrong\n");
    return failed;
}

// True if score i of a row comes before score j.
static int is_before(const float *x, int64_t i, int64_t j) {
    if (isnan(x[i]) || isnan(x[j])) return isnan(x[i]) && (!isnan(x[j]) || i < j);
    return x[i] > x[j] || (x[i] == x[j] && i < j);
}

// The best of rows with equal scores, both zeros, NaNs of both signs, infinities, and numbers that differ in their last bits.
static int check_best(int isa) {
    enum { ROWS = 3 };
    static const float drawn[] = {0, -0.0f, INFINITY, -INFINITY, NAN, -NAN, 1, 1.0000001f, -1, 1e-40f, -1e-40f, 3e38f};
    int failed = 0;
    for (int number = 0; number < 60; number++) {
        const int64_t entries = 1 + draw(number % 3 ? 40 : 700), stride = entries + draw(3), n = 1 + draw(number % 2 ? 9 : 720);
        float *x = allocate((ROWS - 1) * stride + entries, 4), *values = allocate(ROWS * n, 4);
        int32_t *numbers = allocate(ROWS * n, 4);
        for (int64_t i = 0; i < (ROWS - 1) * stride + entries; i++)
            x[i] = number % 5 == 0 ? drawn[draw(12)] : number % 5 == 1 ? -INFINITY : number % 5 == 2 ? 8 + draw(90) * 0x1p-20f : (float)normal();
        failed |= ringtile_best(isa, 1 + number % 2, ROWS, entries, stride, n, x, values, numbers);
        for (int64_t row = 0; row < ROWS; row++, x += stride) {
            int64_t kept = 0;
            for (int64_t j = 0; j < entries; j++) {
                int64_t place = 0;
                for (int64_t i = 0; i < entries; i++) place += is_before(x, i, j);
                if (x[j] == -INFINITY) continue;
                kept++;
                if (place >= n) continue;
                const float value = values[row * n + place];
                failed |= numbers[row * n + place] != j || !(value == x[j] || (isnan(value) && isnan(x[j])));
            }
            for (int64_t i = kept; i < n; i++) failed |= numbers[row * n + i] != -1 || values[row * n + i] != -INFINITY;
        }
        while (n_allocations) free(allocations[--n_allocations]);
    }
    if (failed) printf("%s: best entries are wrong\n", ringtile_isa_name(isa));
    return failed;
}

static void seed(int number, uint64_t more) {
    state = 0x9E3779B97F4A7C15u * (number + 1) + more;
    for (int i = 0; i < 4; i++) draw(2);
}

static void draw_problem(problem *p, int isa, int number) {
    draw_shapes(p, isa, number);
    draw_tiles(p);
    draw_numbers(p);
    make_forward_work(p);
    draw_backward_work(p);
    draw_kept(p);
    draw_inputs(p);
    make_call(p);
}

static int run(int isa, int number) {
    problem p;
    draw_problem(&p, isa, number);
    draw_transform(&p);
    draw_added(&p);
    int failed = compute_forward(&p);
    failed |= compute_backward(&p);
    failed |= check(&p);
    const ringtile_call *c = &p.c;
    if (failed)
        printf("%s case %d: dtype %d, block %d, kind %d, B %d, H %d / %d, %d queries from %d, %d keys, D %d, Dv %d\n",
               ringtile_isa_name(isa), number, c->dtype, c->block, p.kind, (int)c->batch, (int)c->heads,
               (int)c->kv_heads, (int)c->n_queries, (int)c->index.start, (int)c->n_keys, (int)c->head_dim, (int)c->value_dim);
    while (n_allocations) free(allocations[--n_allocations]);
    return failed;
}

// A NaN is a NaN, whatever its payload.
static void add_bits(uint64_t *hash, int dtype, double value) {
    uint64_t bits = 0x7fc0;
    double memory;
    put(&memory, 0, dtype, value);
    if (!isnan(value)) bits = 0, memcpy(&bits, &memory, sizes[dtype]);
    *hash = (*hash ^ bits) * 0x100000001b3u;
}

// Numbers that depend on every bit of some outputs of a dtype, and of their gradients by rows and columns, then by columns.
enum { OUTPUT_BITS, ROW_BITS, COLUMN_BITS, BIT_SUMS };
static void sum_bits(int isa, int dtype, uint64_t *hash) {
    for (int i = 0; i < BIT_SUMS; i++) hash[i] = 0xcbf29ce484222325u;
    const int is_wide = dtype == RINGTILE_FLOAT32_PARTS;
    for (int number = dtype; number < 96; number += is_wide ? 8 : 4) {
        problem p;
        seed(number, 0);
        draw_problem(&p, isa, number);
        compute_forward(&p);
        const ringtile_call *c = &p.c;
        for (int64_t row = 0; row < c->batch * c->heads * c->n_queries; row++) {
            int64_t a = row % c->n_queries, h = row / c->n_queries % c->heads, b = row / c->n_queries / c->heads;
            for (int64_t d = 0; d < c->value_dim; d++)
                add_bits(hash, dtype, get(c->out, place_of(&p.out, b, h, a) + d, dtype));
            // The last bits of a logarithm are the C library's.
            ((float *)c->lse)[row] = rintf(((float *)c->lse)[row] * 1024) / 1024;
        }
        for (int by_columns = 0; by_columns < 2; by_columns++) {
            make_gradients(&p, by_columns);
            compute_backward(&p);
            for (int i = 0; i < 3; i++)
                for (int64_t at = 0; at < p.grad_counts[i]; at++)
                    add_bits(hash + ROW_BITS + by_columns, dtype, get(p.grads[i], at, p.grad_types[i]));
        }
        while (n_allocations) free(allocations[--n_allocations]);
    }
}

// The tiles of AMX and their emulation give these bits on any processor, and from any compiler that fuses products and
// sums.
static int wrong_bits(int isa) {
    static const char *names[BIT_SUMS] = {"outputs", "gradients by rows", "gradients by columns"};
    static const struct {
        int dtype;
        uint64_t sums[BIT_SUMS];
    } recorded[] = {
        {RINGTILE_BFLOAT16, {0x43419d8f5c8cb3e5, 0xc7624b111c54fb2b, 0xc7624b111c54fb2b}},
        {RINGTILE_FLOAT16, {0x62ca92ef92957c8e, 0xef1f8e5ba589176d, 0xef1f8e5ba589176d}},
        {RINGTILE_FLOAT32_PARTS, {0x94813feb5164ab7e, 0x13afa202e9bdf0f7, 0x13afa202e9bdf0f7}},
    };
    int failed = 0;
    for (int number = 0; has_tiles(isa) && number < 3; number++) {
        uint64_t found[BIT_SUMS];
        sum_bits(isa, recorded[number].dtype, found);
        for (int i = 0; i < BIT_SUMS; i++) {
            if (found[i] == recorded[number].sums[i]) continue;
            printf("%s: the bits of %s of dtype %d are %016llx, recorded %016llx\n", ringtile_isa_name(isa), names[i],
                   recorded[number].dtype, (unsigned long long)found[i], (unsigned long long)recorded[number].sums[i]);
            failed++;
        }
    }
    return failed;
}

// Return 0 if the runtime that RINGTILE_OPENMP names is in use, or if it names none.
static int use_runtime(void) {
    const char *path = getenv("RINGTILE_OPENMP");
    if (!path) return 0;
    void *runtime = OPEN(path);
    if (!runtime) return printf("RINGTILE_OPENMP: cannot load %s\n", path), 1;
    void *parallel = FIND(runtime, "GOMP_parallel"), *fork_call = FIND(runtime, "__kmpc_fork_call");
    if (!parallel && !fork_call) return printf("RINGTILE_OPENMP: %s is no OpenMP runtime\n", path), 1;
    ringtile_use_runtime(parallel, FIND(runtime, "__kmpc_global_thread_num"),
                         FIND(runtime, "__kmpc_push_num_threads"), fork_call);
    printf("threads by %s of %s\n", parallel ? "GOMP_parallel" : "__kmpc_fork_call", path);
    return 0;
}

int main(int argc, char **argv) {
    int cases = argc > 1 ? atoi(argv[1]) : 96, failures = 0;
    if (ringtile_abi_version() != RINGTILE_ABI) return 2;
    if (use_runtime()) return 3;
    state = 0x9E3779B97F4A7C15u;
    failures += check_kept();
    failures += check_ascending();
    for (int isa = 0; isa < ringtile_isa_count(); isa++) {
        const char *reason = ringtile_isa_reason(isa);
        if (*reason) {
            printf("%s: %s\n", ringtile_isa_name(isa), reason);
            continue;
        }
        int before = failures;
        failures += wrong_bits(isa) + check_best(isa);
        for (int number = 0; number < cases; number++) {
            seed(number, argc > 2 ? strtoull(argv[2], NULL, 10) : 0);
            failures += run(isa, number) + check_masses(isa, number) + check_rounded(isa, number) + check_scores(isa, number);
            failures += check_lists(isa, number);
        }
        printf("%s: %d cases, %d wrong\n", ringtile_isa_name(isa), cases, failures - before);
    }
    return failures != 0;
}
