// The kernels of AMX, and of its emulation: bfloat16 by tiles, float16 and, if the call allows it, float32 by tiles of
// the parts of numbers, everything else as the set avx512 computes it.
#include "amx.h"
#include "gradients_amx.h"
#include "items.h"
#include "products_amx.h"

#define JOIN(a, b) a##b
#define NAME(a, b) JOIN(a, b)

extern "C" {
int ringtile_forward_avx512(const ringtile_call *);
int ringtile_backward_avx512(const ringtile_call *);
int ringtile_masses_avx512(const ringtile_call *);
int ringtile_lists_avx512(const ringtile_call *);
int ringtile_best_avx512(int, int64_t, int64_t, int64_t, int64_t, const float *, float *, int32_t *);

int NAME(ringtile_lanes_, ISA)() { return ISA::AMX_SIDE; }

// A bias is added on vectors.
static ringtile_call without_tiles(const ringtile_call *c) {
    ringtile_call plain = *c;
    if (plain.dtype == RINGTILE_FLOAT32_PARTS) plain.dtype = RINGTILE_FLOAT32;
    return plain;
}

int NAME(ringtile_forward_, ISA)(const ringtile_call *c) {
    if (c->options.added) {
        const ringtile_call plain = without_tiles(c);
        return ringtile_forward_avx512(&plain);
    }
    switch (c->dtype) {
    case RINGTILE_BFLOAT16:
        return c->head_dim <= 64 ? ISA::forward<ISA::AmxProducts<ISA::bfloat16, 1>>(*c)
                                 : ISA::forward<ISA::AmxProducts<ISA::bfloat16, 2>>(*c);
    case RINGTILE_FLOAT16: return ISA::forward<ISA::AmxProducts<ISA::float16, 2>>(*c);
    case RINGTILE_FLOAT32_PARTS: return ISA::forward<ISA::AmxProducts<float, 2>>(*c);
    default: return ringtile_forward_avx512(c);
    }
}
int NAME(ringtile_backward_, ISA)(const ringtile_call *c) {
    if (c->options.added) {
        const ringtile_call plain = without_tiles(c);
        return ringtile_backward_avx512(&plain);
    }
    switch (c->dtype) {
    case RINGTILE_BFLOAT16: return ISA::backward<ISA::AmxGradients<ISA::bfloat16>>(*c);
    case RINGTILE_FLOAT16: return ISA::backward<ISA::AmxGradients<ISA::float16>>(*c);
    case RINGTILE_FLOAT32_PARTS: return ISA::backward<ISA::AmxGradients<float>>(*c);
    default: return ringtile_backward_avx512(c);
    }
}
int NAME(ringtile_masses_, ISA)(const ringtile_call *c) {
    return c->dtype == RINGTILE_INT8 ? ISA::rounded_masses(*c) : ringtile_masses_avx512(c);
}
int NAME(ringtile_lists_, ISA)(const ringtile_call *c) { return ringtile_lists_avx512(c); }
int NAME(ringtile_best_, ISA)(int threads, int64_t rows, int64_t entries, int64_t stride, int64_t n, const float *scores,
                              float *values, int32_t *numbers) {
    return ringtile_best_avx512(threads, rows, entries, stride, n, scores, values, numbers);
}
int NAME(ringtile_scores_, ISA)(const ringtile_call *c) { return ISA::rounded_scores(*c); }

// Add A * B to C so many times, without leaving the registers.
void NAME(ringtile_multiply_tiles_, ISA)(const void *a, const void *b, float *c, int64_t count) {
    ISA::AmxUnit unit;
    ISA::amx_load<0>(c, 64);
    ISA::amx_load<1>(a, 64);
    ISA::amx_load<2>(b, 64);
    while (count-- > 0) ISA::amx_dot<0, 1, 2>();
    ISA::amx_store<0>(c, 64);
}
}
