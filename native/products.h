// The matrix products of the forward pass are a policy, a template parameter of forward.h.
#pragma once
#include "softmax.h"

namespace ISA {

// The members of a policy P of the forward pass. A policy without one of them, or with other arguments, does not compile.
//   Element, Number         the type of the tensors, and the type in which sums are accumulated
//   Unit                    prepares the processor while a thread computes
//   LANES, LANE_STEP        queries of a group, and what the number of the first packed query is a multiple of
//   KEY_STEP                what the number of the first key of a group is a multiple of
//   size(call)              the scratch of a policy, in numbers of type Number
//   pack_queries(...)       the queries of a row tile, once, with zeros in lanes without a query; the sign is 1, -1 or 0
//   load_tile(...)          the next tile's keys and values; it may bring memory ahead into a cache
//   reach(...)              the keys of the tile that a group of lanes needs
//   scores(...)             of `count` keys that start at `first`, [key][lane], for the group `offset` lanes after the first
//   weigh(...)              scores become weights, in a form of the policy's own
//   add_values(...)         weights times values, added to sums [d][lane]
template <class P, class T = typename P::Number>
constexpr bool is_forward_policy(P *p = nullptr, const Head *head = nullptr, T *x = nullptr, const Mask *mask = nullptr,
                                 Softmax<T> *softmax = nullptr) {
    using calls = decltype(p->pack_queries(*head, Side{}, 0, 0, T()), p->load_tile(*head, Side{}, nullptr),
                     p->scores(0, 0, 0, 0, x), p->weigh(0, x, 0, 0, 0, T(), *mask, nullptr, *softmax),
                     p->add_values(0, 0, 0, x, x, Ahead{}));
    using numbers = decltype(p->reach(*mask, Side{}, Side{}, 0).last + P::size(p->c));
    return sizeof(calls *) && sizeof(numbers) && sizeof(typename P::Element) && sizeof(typename P::Unit) &&
           P::LANES % P::LANE_STEP == 0 && P::KEY_STEP > 0;
}

// Multiply in the accumulation type: keys and values are read in place if they have it, and widened otherwise.
template <class E, class T> struct Plain : VectorWeights<T> {
    using Element = E;
    using Number = T;
    static constexpr int KEY_STEP = 1;

    const ringtile_call &c;
    T *queries, *key_copy, *value_copy;
    Rows<T> keys, values;
    int fetched;  // the first value of the tile that is not on its way to the cache

    static int64_t size(const ringtile_call &c) { return (2 * c.head_dim + c.value_dim) * MAX_BLOCK; }

    Plain(const ringtile_call &call, T *memory) : c(call), keys(), values(), fetched() {
        queries = memory;
        key_copy = queries + c.head_dim * MAX_BLOCK;
        value_copy = key_copy + c.head_dim * MAX_BLOCK;
    }

    // Pack lanes from `from` to `to`.
    INLINE void pack_queries(const Head &head, Side tokens, int from, int to, T sign) {
        Packing packing(c);
        pack(query_rows<E>(c, head, tokens), tokens, from, to, sign);
    }
    INLINE void pack(Rows<E> rows, Side tokens, int from, int to, T sign) {
        transpose_in(rows, tokens.low, tokens.high, from, to, c.head_dim, sign, queries);
    }

    INLINE void load_tile(const Head &head, Side tokens, const uint32_t *unused) {
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
