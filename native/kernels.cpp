// Everything of one instruction set: compiled once for each, with ISA naming it.
#include "items.h"

#define JOIN(a, b) a##b
#define NAME(a, b) JOIN(a, b)

extern "C" {
int NAME(ringtile_lanes_, ISA)() {
    return ISA::NR * ISA::Lanes<float>::count;
}

#if HAS_BF16_PAIRS
// What has no pairs is computed by another set. Lists are widened to float32.
int ringtile_forward_avx512(const ringtile_call *);
int ringtile_backward_avx512(const ringtile_call *);
int ringtile_masses_avx512(const ringtile_call *);
int ringtile_lists_avx512(const ringtile_call *);
int ringtile_best_avx512(int, int64_t, int64_t, int64_t, int64_t, const float *, float *, int32_t *);
static bool has_pairs(const ringtile_call *c) { return c->dtype == RINGTILE_BFLOAT16 && c->head_dim % 2 == 0; }

int NAME(ringtile_forward_, ISA)(const ringtile_call *c) {
    return has_pairs(c) ? ISA::forward<ISA::Bf16Pairs>(*c) : ringtile_forward_avx512(c);
}
int NAME(ringtile_backward_, ISA)(const ringtile_call *c) {
    return has_pairs(c) ? ISA::backward<ISA::PlainGradients<ISA::bfloat16, float, true>>(*c) : ringtile_backward_avx512(c);
}
int NAME(ringtile_masses_, ISA)(const ringtile_call *c) {
    if (c->dtype == RINGTILE_INT8) return ISA::rounded_masses(*c);
    return has_pairs(c) ? ISA::masses<ISA::Bf16Pairs>(*c) : ringtile_masses_avx512(c);
}
int NAME(ringtile_lists_, ISA)(const ringtile_call *c) { return ringtile_lists_avx512(c); }
int NAME(ringtile_best_, ISA)(int threads, int64_t rows, int64_t entries, int64_t stride, int64_t n, const float *scores,
                              float *values, int32_t *numbers) {
    return ringtile_best_avx512(threads, rows, entries, stride, n, scores, values, numbers);
}
#else
int NAME(ringtile_forward_, ISA)(const ringtile_call *c) {
    switch (c->dtype) {
    case RINGTILE_FLOAT32: return ISA::forward<ISA::Plain<float, float>>(*c);
    case RINGTILE_FLOAT64: return ISA::forward<ISA::Plain<double, double>>(*c);
    case RINGTILE_BFLOAT16: return ISA::forward<ISA::Plain<ISA::bfloat16, float>>(*c);
    default: return ISA::forward<ISA::Plain<ISA::float16, float>>(*c);
    }
}
int NAME(ringtile_backward_, ISA)(const ringtile_call *c) {
    switch (c->dtype) {
    case RINGTILE_FLOAT32: return ISA::backward<ISA::PlainGradients<float, float>>(*c);
    case RINGTILE_FLOAT64: return ISA::backward<ISA::PlainGradients<double, double>>(*c);
    case RINGTILE_BFLOAT16: return ISA::backward<ISA::PlainGradients<ISA::bfloat16, float>>(*c);
    default: return ISA::backward<ISA::PlainGradients<ISA::float16, float>>(*c);
    }
}
int NAME(ringtile_masses_, ISA)(const ringtile_call *c) {
    switch (c->dtype) {
    case RINGTILE_INT8: return ISA::rounded_masses(*c);
    case RINGTILE_FLOAT32: return ISA::masses<ISA::Plain<float, float>>(*c);
    case RINGTILE_BFLOAT16: return ISA::masses<ISA::Plain<ISA::bfloat16, float>>(*c);
    default: return ISA::masses<ISA::Plain<ISA::float16, float>>(*c);
    }
}
int NAME(ringtile_lists_, ISA)(const ringtile_call *c) { return ISA::lists(*c); }
int NAME(ringtile_best_, ISA)(int threads, int64_t rows, int64_t entries, int64_t stride, int64_t n, const float *scores,
                              float *values, int32_t *numbers) {
    return ISA::best(threads, rows, entries, stride, n, scores, values, numbers);
}
#endif
int NAME(ringtile_scores_, ISA)(const ringtile_call *c) { return ISA::rounded_scores(*c); }
}
