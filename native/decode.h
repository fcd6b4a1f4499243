// Up to four queries against a tile, as in decoding. The head dim is in the lanes, so no lane is idle, and each key and
// value is read once.
#pragma once
#include "tile.h"

namespace ISA {

constexpr int DECODE_QUERIES = 4;

// True if a row tile of these queries uses this path.
template <class T> INLINE bool decodes(const ringtile_call &c, Side queries) {
    constexpr int L = Lanes<T>::count;
    return queries.high - queries.low <= DECODE_QUERIES && !c.options.dropout_threshold && c.head_dim % L == 0 &&
           c.value_dim % L == 0;
}

// Scores [n_queries][MAX_BLOCK]. `width` is a multiple of the lanes. The backward pass calls this too: with another order
// of additions, weights exp(score - lse) would be off by |score| roundings.
template <class T, class Keys = Rows<T>>
void decode_scores(Rows<T> queries, int n_queries, Keys keys, int n_keys, int64_t width, T *scores) {
    constexpr int L = Lanes<T>::count, SOME = L < 4 ? L : 4;  // of the keys at once: each sum waits for the one before
    for (int k = 0; k < n_keys; k += L)
        for (int r = 0; r < n_queries; r++) {
            Vec<T> sum[L];
#pragma GCC unroll 4
            for (int i = 0; i < L; i += SOME) {
                // Past the end, read the last key again and ignore the result.
                const T *key[SOME];
                Vec<T> some[SOME] = {};
                for (int j = 0; j < SOME; j++) key[j] = keys.row(min(k + i + j, n_keys - 1));
                for (int64_t d = 0; d < width && k + i < n_keys; d += L)
                    for (int j = 0; j < SOME; j++) some[j] += load(queries.row(r) + d) * load(key[j] + d);
                for (int j = 0; j < SOME; j++) sum[i + j] = some[j];
            }
            store(scores + r * MAX_BLOCK + k, sums_of<T>(sum));
        }
}

// One step of the online softmax: scores [n_queries][MAX_BLOCK] become weights, sums are [n_queries][value_dim].
template <class T>
void decode_softmax_step(T *scores, int n_queries, int n_keys, T base, bool masked, T *highest, T *total, T *sums,
                         int64_t value_dim) {
    constexpr int L = Lanes<T>::count;
    const T low = -infinity<T>();
    for (int r = 0; r < n_queries; r++) {
        T *row = scores + r * MAX_BLOCK;
        int end = (n_keys + L - 1) / L * L;
        for (int k = n_keys; k < end; k++) row[k] = low;
        Vec<T> tops = load(row);
        for (int k = L; k < end; k += L) tops = max<T>(tops, load(row + k));
        T top = tops[0];
        for (int l = 1; l < L; l++) top = tops[l] > top ? tops[l] : top;
        T now = top > highest[r] ? top : highest[r], safe = now == low ? T(0) : now;
        T share = highest[r] == low ? T(0) : exp2<T>(splat<T>((highest[r] - safe) * base))[0];
        Vec<T> sum = {};
        for (int k = 0; k < end; k += L) {
            Vec<T> s = load(row + k), p = exp2<T>((s - safe) * base);
            if (masked || k + L > n_keys) p = s == low ? Vec<T>{} : p;
            store(row + k, p);
            sum += p;
        }
        T weight = 0;
        for (int l = 0; l < L; l++) weight += sum[l];
        total[r] = total[r] * share + weight;
        highest[r] = now;
        for (int64_t d = 0; d < value_dim; d += L) store(sums + r * value_dim + d, load(sums + r * value_dim + d) * share);
    }
}

}  // namespace ISA
