// The matrix products of the forward pass are a policy, a template parameter of forward.h. A policy packs the queries of
// a row tile once, reads each tile's keys and values, and for groups of LANES computes scores [key][lane], weighs them in
// a form of its own, and adds weights times values to sums [d][lane]. The first lane that it packs is a multiple of
// LANE_STEP, the first key of a group one of KEY_STEP. It may bring memory ahead into a cache. Its Unit prepares the processor while a thread computes.
#pragma once
#include "softmax.h"

namespace ISA {

// Multiply in the accumulation type: keys and values are read in place if they have it, and widened otherwise.
template <class E, class T> struct Plain : VectorWeights<T> {
    typedef E Element;
    typedef T Number;
    static constexpr int KEY_STEP = 1;

    const ringtile_call &c;
    T *queries, *key_copy, *value_copy;
    Rows<T> keys, values;
    int fetched;  // the first value of the tile that is not on its way to the cache

    // The scratch of a policy, in numbers of the accumulation type.
    static int64_t size(const ringtile_call &c) { return (2 * c.head_dim + c.value_dim) * MAX_BLOCK; }

    Plain(const ringtile_call &call, T *memory) : c(call), keys(), values(), fetched() {
        queries = memory;
        key_copy = queries + c.head_dim * MAX_BLOCK;
        value_copy = key_copy + c.head_dim * MAX_BLOCK;
    }

    // Pack lanes from `from` to `to`, with zeros in lanes without a query. The sign is 1, -1 or 0.
    INLINE void pack_queries(const Head &head, Tokens tokens, int from, int to, T sign) {
        Packing packing(c);
        pack(query_rows<E>(c, head, tokens), tokens, from, to, sign);
    }
    INLINE void pack(Rows<E> rows, Tokens tokens, int from, int to, T sign) {
        transpose_in(rows, tokens.low, tokens.high, from, to, c.head_dim, sign, queries);
    }

    INLINE void load_tile(const Head &head, Tokens tokens, const uint32_t *unused) {
        constexpr bool same = sizeof(E) == sizeof(T);
        Rows<E> key = key_rows<E>(c, head, tokens), value = value_rows<E>(c, head, tokens);
        keys = {(const T *)key.x, key.step};
        values = {(const T *)value.x, value.step};
        fetched = 0;
        if (same && !unused) return;
        fetched = MAX_BLOCK;
        Packing packing(c);
        if (!same) {
            copy_in(key, tokens.high, c.head_dim, c.head_dim, nullptr, key_copy);
            keys = {key_copy, c.head_dim};
        }
        copy_in(value, tokens.high, c.value_dim, c.value_dim, unused, value_copy);
        values = {value_copy, c.value_dim};
    }

    // Scores of `count` keys that start at `first`, for the group of lanes `offset` lanes after the first packed one.
    INLINE void scores(int vectors, int offset, int first, int count, T *scores) {
        const int begin = (int)max(first, fetched);
        matmul<T, true>(vectors, keys.row(first), keys.step, queries + offset * c.head_dim, GROUP<T>, scores,
                        GROUP<T>, count, c.head_dim, false, ahead_of(values, begin, first + count - begin, c.value_dim));
        fetched = (int)max(fetched, first + count);
    }

    INLINE void add_values(int vectors, int first, int count, const T *weights, T *sums, Ahead ahead) {
        matmul<T, false>(vectors, values.row(first), values.step, weights, GROUP<T>, sums, MAX_BLOCK,
                         c.value_dim, count, true, ahead);
    }
};

}  // namespace ISA
