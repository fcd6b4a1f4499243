// The differences between operating systems: exported names, threads, aligned memory and the clock.
#pragma once
#include <stdint.h>
#include <stdlib.h>
#if defined(_WIN32)
#include <malloc.h>
extern "C" __declspec(dllimport) int __stdcall QueryPerformanceCounter(int64_t *count);
extern "C" __declspec(dllimport) int __stdcall QueryPerformanceFrequency(int64_t *rate);
#define PUBLIC extern "C" __declspec(dllexport)
#else
#include <time.h>
#define PUBLIC extern "C" __attribute__((visibility("default")))
#endif

// Run body(data) on up to `threads` threads of the runtime that ringtile_use_runtime named, and return when all are done.
// The body may not count on a number of threads: the runtime can provide fewer.
extern "C" void ringtile_parallel(int threads, void (*body)(void *), void *data);

// `bytes` is a multiple of 64.
static inline void *allocate_aligned(int64_t bytes) {
#if defined(_WIN32)
    return _aligned_malloc((size_t)bytes, 64);
#else
    return aligned_alloc(64, (size_t)bytes);
#endif
}

static inline void free_aligned(void *memory) {
#if defined(_WIN32)
    _aligned_free(memory);
#else
    free(memory);
#endif
}

static inline int64_t nanoseconds() {
    const int64_t second = 1000000000;
#if defined(_WIN32)
    int64_t count, rate;
    QueryPerformanceCounter(&count);
    QueryPerformanceFrequency(&rate);
    return count / rate * second + count % rate * second / rate;
#else
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * second + t.tv_nsec;
#endif
}
