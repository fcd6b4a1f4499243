// The library's interface, compiled for any processor: its ABI, its threads, its instruction sets and the calls.
#include <stddef.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if !defined(_WIN32)
#include <pthread.h>
#endif
#if defined(__linux__)
#include <errno.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "platform.h"
#include "ringtile.h"

using kernel = int(const ringtile_call *);
using peak = double(int kind, int threads, double seconds);
using lanes = int();
using best = int(int threads, int64_t rows, int64_t entries, int64_t stride, int64_t n, const float *scores, float *values,
                 int32_t *numbers);

using multiply = void(const void *a, const void *b, float *c, int64_t count);
using reason = const char *();

#define DECLARE(isa)                                  \
    extern "C" kernel ringtile_forward_##isa;         \
    extern "C" kernel ringtile_backward_##isa;        \
    extern "C" kernel ringtile_masses_##isa;          \
    extern "C" kernel ringtile_lists_##isa;           \
    extern "C" kernel ringtile_scores_##isa;          \
    extern "C" best ringtile_best_##isa;              \
    extern "C" peak ringtile_peak_##isa;              \
    extern "C" lanes ringtile_lanes_##isa;
#define DECLARE_TILES(isa) \
    DECLARE(isa)           \
    extern "C" multiply ringtile_multiply_tiles_##isa;
#define FUNCTIONS(isa)                                                                                     \
    #isa, reason_against_##isa, ringtile_forward_##isa, ringtile_backward_##isa, ringtile_masses_##isa, \
        ringtile_lists_##isa, ringtile_scores_##isa, ringtile_best_##isa, ringtile_peak_##isa, ringtile_lanes_##isa
#define ENTRY(isa) {FUNCTIONS(isa), nullptr}
#define TILES_ENTRY(isa) {FUNCTIONS(isa), ringtile_multiply_tiles_##isa}

struct Kernels {
    const char *name;
    reason *against;  // empty if this processor runs the set
    kernel *forward, *backward, *masses, *lists, *scores;
    best *rank;
    peak *rate;
    lanes *together;
    multiply *multiply_tiles;
};

#if defined(__x86_64__)
struct Features {
    bool avx2, avx512, bfloat16_dots, tiles, saves_tiles;
};

// We read CPUID ourselves: __builtin_cpu_supports is a stub in some compiler runtimes. The operating system must save the
// registers too, as extended control register 0 tells.
static Features features() {
    const unsigned avx2_c1 = bit_FMA | bit_OSXSAVE | bit_AVX | bit_F16C, avx2_b7 = bit_AVX2;
    const unsigned avx512_c1 = bit_MOVBE | bit_POPCNT;
    const unsigned avx512_b7 = bit_BMI | bit_BMI2 | bit_AVX512F | bit_AVX512CD | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL;
    const unsigned lzcnt = 1u << 5, bfloat16_dots = 1u << 5, byte_dots = 1u << 11, tiles = 1u << 24 | 1u << 22;
    const unsigned saves_256 = 0x6, saves_512 = 0xe6, saves_tiles = 0x60000;
    Features found = {};
    unsigned a, b, c, d, c1, b7, c7, d7, a71 = 0, extended = 0, saved, high;
    if (!__get_cpuid(1, &a, &b, &c1, &d) || (c1 & avx2_c1) != avx2_c1) return found;
    if (!__get_cpuid_count(7, 0, &a, &b7, &c7, &d7) || (b7 & avx2_b7) != avx2_b7) return found;
    if (a >= 1) __get_cpuid_count(7, 1, &a71, &b, &c, &d);
    __get_cpuid(0x80000001, &a, &b, &extended, &d);
    __asm__("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
    found.avx2 = (saved & saves_256) == saves_256;
    found.avx512 = found.avx2 && (c1 & avx512_c1) == avx512_c1 && (b7 & avx512_b7) == avx512_b7 && (extended & lzcnt) &&
                   (saved & saves_512) == saves_512;
    // Every processor with dot products of bfloat16 has those of bytes.
    found.bfloat16_dots = found.avx512 && (a71 & bfloat16_dots) && (c7 & byte_dots);
    found.tiles = found.bfloat16_dots && (d7 & tiles) == tiles;
    found.saves_tiles = (saved & saves_tiles) == saves_tiles;
    return found;
}

static const char *unless(bool present) { return present ? "" : "this processor lacks it"; }

static const char *reason_against_avx2() { return unless(features().avx2); }
static const char *reason_against_avx512() { return unless(features().avx512); }
[[maybe_unused]] static const char *reason_against_avx512_bf16() { return unless(features().bfloat16_dots); }

DECLARE(avx2)
DECLARE(avx512)
DECLARE(avx512_bf16)

#if defined(__linux__)
// Linux saves tiles only for processes that ask before their first tile instruction, which would be illegal otherwise.
// The permission is for all threads. To ask again does no harm.
static const char *tiles_refused() {
    const long request_permission = 0x1023, tile_data = 18;
    if (!syscall(SYS_arch_prctl, request_permission, tile_data)) return "";
    switch (errno) {
    case EINVAL:
    case EOPNOTSUPP: return "Linux gives no tiles: it must be 5.16 or newer";
    case ENOSPC: return "Linux gives no tiles: the signal stack of a thread is too small for them";
    case EPERM:
    case EACCES:
    case ENOSYS: return "Linux gives no tiles: a sandbox forbids asking for them";
    default: return "Linux gives no tiles";
    }
}

[[maybe_unused]] static const char *reason_against_amx() {
    static const char *answer;
    const char *known = __atomic_load_n(&answer, __ATOMIC_RELAXED);
    if (known) return known;
    const Features found = features();
    known = !found.tiles         ? unless(false)
            : !found.saves_tiles ? "the operating system does not save tiles"
                                 : tiles_refused();
    __atomic_store_n(&answer, known, __ATOMIC_RELAXED);
    return known;
}

DECLARE_TILES(amx)
#define AMX , TILES_ENTRY(amx)
#else
#define AMX
#endif

#if defined(EMULATE_AMX)
[[maybe_unused]] static const char *reason_against_amx_emulated() {
    return features().avx512 ? "" : "this processor lacks avx512, with which it is emulated";
}

DECLARE_TILES(amx_emulated)
#define EMULATED , TILES_ENTRY(amx_emulated)
#else
#define EMULATED
#endif

static const Kernels all[] = {ENTRY(avx2), ENTRY(avx512), ENTRY(avx512_bf16) AMX EMULATED};
#else
static const char *reason_against_neon() { return ""; }

DECLARE(neon)
static const Kernels all[] = {ENTRY(neon)};
#endif

// In a forked child the runtime waits for ever: its threads stayed with the parent.
static bool forked;
#if !defined(_WIN32)
static void in_child() { forked = true; }
__attribute__((constructor)) static void watch_forks() { pthread_atfork(nullptr, nullptr, in_child); }
#endif

// The entry points of an OpenMP runtime: GNU's, or LLVM's and Intel's with the source location that they want.
struct Location {
    int32_t reserved, flags, more[2];
    const char *source;
};
using gomp_parallel = void(void (*body)(void *), void *data, unsigned threads, unsigned flags);
using kmpc_thread_number = int32_t(Location *);
using kmpc_push_threads = void(Location *, int32_t number, int32_t threads);
using kmpc_fork_call = void(Location *, int32_t count, void (*body)(int32_t *, int32_t *, ...), ...);

static struct {
    gomp_parallel *parallel;
    kmpc_thread_number *thread_number;
    kmpc_push_threads *push_threads;
    kmpc_fork_call *fork_call;
} runtime;

static void kmpc_body(int32_t *, int32_t *, void (*body)(void *), void *data) { body(data); }

extern "C" void ringtile_parallel(int threads, void (*body)(void *), void *data) {
    static Location location = {0, 2, {0, 0}, ";ringtile;parallel;0;0;;"};
    if (threads > 1 && !forked && runtime.parallel) {
        runtime.parallel(body, data, (unsigned)threads, 0);
    } else if (threads > 1 && !forked && runtime.fork_call) {
        runtime.push_threads(&location, runtime.thread_number(&location), threads);
        runtime.fork_call(&location, 2, (void (*)(int32_t *, int32_t *, ...))kmpc_body, body, data);
    } else {
        body(data);
    }
}

// The addresses of GOMP_parallel, or else of __kmpc_global_thread_num, __kmpc_push_num_threads and __kmpc_fork_call.
// Without either, calls run on one thread.
PUBLIC void ringtile_use_runtime(void *parallel, void *thread_number, void *push_threads, void *fork_call) {
    runtime = {(gomp_parallel *)parallel, (kmpc_thread_number *)thread_number, (kmpc_push_threads *)push_threads,
               (kmpc_fork_call *)fork_call};
}

struct Field {
    const char *name;
    int64_t offset, size;
    char kind;  // of its numbers: i for int32, l for int64, d for double. A pointer has the capital of its elements: I, L, D,
                // H for uint16, F for float, N for ringtile_number, S for ringtile_sum
};

static constexpr char kind_of(const int32_t &) { return 'i'; }
static constexpr char kind_of(const double &) { return 'd'; }
static constexpr char kind_of(const int64_t &) { return 'l'; }
static constexpr char kind_to(const int32_t *) { return 'I'; }
static constexpr char kind_to(const int64_t *) { return 'L'; }
static constexpr char kind_to(const double *) { return 'D'; }
static constexpr char kind_to(const uint16_t *) { return 'H'; }
static constexpr char kind_to(const float *) { return 'F'; }
static constexpr char kind_to(const ringtile_number *) { return 'N'; }
static constexpr char kind_to(const ringtile_sum *) { return 'S'; }
template <class T> static constexpr char kind_of(T *const &) { return kind_to((T *)nullptr); }
template <class T, int N> static constexpr char kind_of(const T (&)[N]) { return kind_of(T()); }

static constexpr ringtile_call blank = {};
#define FIELD(path, name) {#name, offsetof(ringtile_call, path name), sizeof(blank.path name), kind_of(blank.path name)},
#define CALL(name) FIELD(, name)
#define INDEX(name) FIELD(index., name)
#define OPTION(name) FIELD(options., name)
#define WORK(name) FIELD(work., name)
#define FORWARD(name) FIELD(forward., name)
#define BACKWARD(name) FIELD(backward., name)
#define MASSES(name) FIELD(masses., name)
#define LISTS(name) FIELD(lists., name)

static constexpr Field fields[] = {
    CALL(dtype) CALL(isa) CALL(threads) CALL(block) CALL(batch) CALL(heads) CALL(kv_heads) CALL(n_queries) CALL(n_keys)
    CALL(head_dim) CALL(value_dim) CALL(q) CALL(k) CALL(v) CALL(q_stride) CALL(k_stride) CALL(v_stride) CALL(out)
    CALL(out_stride) CALL(lse)
    INDEX(start) INDEX(n_rows) INDEX(n_cols) INDEX(n_groups) INDEX(group_stride) INDEX(group) INDEX(full_row_ptr)
    INDEX(full_col) INDEX(part_row_ptr) INDEX(part_col) INDEX(part_tile) INDEX(full_col_ptr) INDEX(full_row)
    INDEX(part_col_ptr) INDEX(part_row) INDEX(part_tile_t) INDEX(bits) INDEX(bits_t) INDEX(rows_any) INDEX(cols_any)
    INDEX(row_at) INDEX(col_at)
    OPTION(scale) OPTION(key_bits) OPTION(key_words) OPTION(key_lengths) OPTION(head_at) OPTION(batch_at) OPTION(seed)
    OPTION(dropout_threshold)
    OPTION(softcap) OPTION(true_scale) OPTION(slopes) OPTION(added) OPTION(added_stride)
    OPTION(added_places) OPTION(added_queries) OPTION(added_keys)
    WORK(phase) WORK(first_item) WORK(last_item) WORK(first_col) WORK(last_col) WORK(scratch) WORK(times)
    FORWARD(work) FORWARD(work_begin) FORWARD(item_begin) FORWARD(n_splits)
    BACKWARD(out_grad) BACKWARD(out_grad_stride) BACKWARD(lse_grad) BACKWARD(delta) BACKWARD(q_grad) BACKWARD(k_grad)
    BACKWARD(v_grad) BACKWARD(q_sums) BACKWARD(row_splits) BACKWARD(col_splits) BACKWARD(row_buffer) BACKWARD(n_row_buffers)
    BACKWARD(row_buffers) BACKWARD(shared_splits) BACKWARD(n_shared_splits) BACKWARD(added_grad)
    BACKWARD(added_grad_stride)
    MASSES(sums) MASSES(segment) MASSES(n_pooled) MASSES(pooled_step) MASSES(seen) MASSES(pool_begin) MASSES(bias)
    MASSES(bias_stride) MASSES(pool_max) MASSES(by_sign) MASSES(relu) MASSES(query_scale) MASSES(key_scale) MASSES(key_sum)
    LISTS(indices) LISTS(indices_stride) LISTS(list_groups) LISTS(list_length) LISTS(limits) LISTS(limits_stride)
    LISTS(list_rows) LISTS(run) LISTS(item_runs) LISTS(first_run) LISTS(last_run) LISTS(first_head) LISTS(union_entries)
    LISTS(union_bits) LISTS(union_length) LISTS(union_room) LISTS(union_cost) LISTS(chunk_keys) LISTS(weights)
    LISTS(weights_room) LISTS(key_sums) LISTS(value_sums)
};
static constexpr int n_fields = sizeof(fields) / sizeof(fields[0]);

// True if each field begins where the one before it ends, up to the end of a call: none is missing, and none is padded.
static constexpr bool fields_fill_a_call() {
    int64_t end = 0;
    for (int number = 0; number < n_fields; end += fields[number++].size)
        if (fields[number].offset != end) return false;
    return end == sizeof(ringtile_call);
}
static_assert(fields_fill_a_call(), "list the fields of ringtile_call here, in their order");

PUBLIC int ringtile_abi_version() { return RINGTILE_ABI; }

// The name of a field of ringtile_call, its size in bytes and the kind of its numbers. Null past the last field.
PUBLIC const char *ringtile_call_field(int number, int64_t *size, int64_t *kind) {
    if (number >= n_fields) return nullptr;
    *size = fields[number].size;
    *kind = fields[number].kind;
    return fields[number].name;
}

PUBLIC int ringtile_isa_count() { return sizeof(all) / sizeof(all[0]); }
PUBLIC const char *ringtile_isa_name(int isa) { return all[isa].name; }

// Why this processor or its operating system does not run a set. Empty if they do.
PUBLIC const char *ringtile_isa_reason(int isa) { return all[isa].against(); }

// The number of float32 tokens of a tile that a kernel computes together: it skips them if none keeps a pair.
PUBLIC int ringtile_lanes(int isa) { return all[isa].together(); }

PUBLIC int ringtile_forward(const ringtile_call *call) { return all[call->isa].forward(call); }
PUBLIC int ringtile_backward(const ringtile_call *call) { return all[call->isa].backward(call); }
PUBLIC int ringtile_masses(const ringtile_call *call) { return all[call->isa].masses(call); }
PUBLIC int ringtile_lists(const ringtile_call *call) { return all[call->isa].lists(call); }
PUBLIC int ringtile_scores(const ringtile_call *call) { return all[call->isa].scores(call); }

// Write the n best scores of each row and their numbers, the best first: NaNs, then the largest, and of equal ones the one
// with the smallest number. A row without so many scores above -inf ends in -inf and -1. Return 0, or 1 if memory ran out.
PUBLIC int ringtile_best(int isa, int threads, int64_t rows, int64_t entries, int64_t stride, int64_t n, const float *scores,
                         float *values, int32_t *numbers) {
    return all[isa].rank(threads, rows, entries, stride, n, scores, values, numbers);
}

// Add A[16][32] * B[16][16][2], whose numbers are bfloat16, to C[16][16] so many times. Return 0, or 1 if the set has no
// tiles.
PUBLIC int ringtile_multiply_tiles(int isa, const void *a, const void *b, float *c, int64_t count) {
    if (!all[isa].multiply_tiles) return 1;
    all[isa].multiply_tiles(a, b, c, count);
    return 0;
}

// The highest rate of one kind of work (ringtile_rate), summed over the threads. Each works for this many seconds.
PUBLIC double ringtile_peak(int isa, int kind, int threads, double seconds) {
    return all[isa].rate(kind, threads, seconds);
}
