// The library's face, compiled for any processor: which instruction sets are there, and the calls.
#include <pthread.h>

#include "ringtile.h"

#define PUBLIC extern "C" __attribute__((visibility("default")))
typedef int kernel(const ringtile_call *);
typedef double peak(int kind, int threads, double seconds);
typedef int lanes();

#define DECLARE(isa)                                  \
    extern "C" kernel ringtile_forward_##isa;         \
    extern "C" kernel ringtile_backward_##isa;        \
    extern "C" peak ringtile_peak_##isa;              \
    extern "C" lanes ringtile_lanes_##isa;
#define ENTRY(isa) {#isa, ringtile_forward_##isa, ringtile_backward_##isa, ringtile_peak_##isa, ringtile_lanes_##isa}

struct Kernels {
    const char *name;
    kernel *forward, *backward;
    peak *rate;
    lanes *together;
};

#if defined(__x86_64__)
DECLARE(avx2)
DECLARE(avx512)
DECLARE(avx512_bf16)
static const Kernels all[] = {ENTRY(avx2), ENTRY(avx512), ENTRY(avx512_bf16)};

static bool runs(int isa) {
    __builtin_cpu_init();
    bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    return isa == 0 ? avx2 : isa == 1 ? avx512 : avx512 && __builtin_cpu_supports("avx512bf16");
}
#else
DECLARE(neon)
static const Kernels all[] = {ENTRY(neon)};

static bool runs(int) { return true; }
#endif

// OpenMP hangs in a forked child: its threads stayed with the parent.
static bool forked;
static void in_child() { forked = true; }
__attribute__((constructor)) static void watch_forks() { pthread_atfork(nullptr, nullptr, in_child); }

PUBLIC int64_t ringtile_call_size() { return sizeof(ringtile_call); }
PUBLIC int ringtile_isa_count() { return sizeof(all) / sizeof(all[0]); }
PUBLIC const char *ringtile_isa_name(int isa) { return all[isa].name; }
PUBLIC int ringtile_isa_runs(int isa) { return runs(isa); }

// How many tokens of a tile, in float32, a kernel takes together: what none of them keeps it does not compute.
PUBLIC int ringtile_lanes(int isa) { return all[isa].together(); }

PUBLIC int ringtile_forward(const ringtile_call *call) {
    ringtile_call c = *call;
    if (forked) c.threads = 1;
    return all[c.isa].forward(&c);
}

PUBLIC int ringtile_backward(const ringtile_call *call) {
    ringtile_call c = *call;
    if (forked) c.threads = 1;
    return all[c.isa].backward(&c);
}

// The highest rate of a kind of work (ringtile_rate) with so many threads; each works for so many seconds.
PUBLIC double ringtile_peak(int isa, int kind, int threads, double seconds) {
    return all[isa].rate(kind, forked ? 1 : threads, seconds);
}
