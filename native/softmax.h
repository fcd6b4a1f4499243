// The online softmax of a row tile: its state, the kept pairs of a tile, and its step on vectors of scores.
#pragma once
#include "tile.h"

namespace ISA {

// The running softmax of a row tile, by lane: the maximum score, before scaling, the sum of weights, and the weighted
// values [value_dim][MAX_BLOCK]. Weights are exp2((score - maximum) * base): differences are scaled, because the rounding
// of a scaled maximum grows with the score. One after another they are also the form in which the splits of a row wait in scratch.
template <class T> struct Softmax {
    int64_t value_dim;
    T *highest, *total, *sums;

    static int64_t size(const ringtile_call &c) { return (c.value_dim + 2) * MAX_BLOCK; }
    // With space for a policy that adds whole tiles of dims.
    static int64_t room(const ringtile_call &c) { return (round16(c.value_dim) + 2) * MAX_BLOCK; }

    INLINE Softmax(const ringtile_call &c, T *x)
        : value_dim(c.value_dim), highest(x), total(x + MAX_BLOCK), sums(x + 2 * MAX_BLOCK) {}

    INLINE void clear(int from, int end) {
        for (int64_t d = 0; d < value_dim; d++)
            for (int lane = from; lane < end; lane++) sums[d * MAX_BLOCK + lane] = 0;
        for (int lane = from; lane < end; lane++) highest[lane] = -infinity<T>(), total[lane] = 0;
    }
};

// A positive scale of scores, in base e and in base 2. Its sign, or a zero, goes into the queries.
INLINE double size_of_scale(const ringtile_call &c) { return c.options.scale == 0 ? 1 : __builtin_fabs(c.options.scale); }
template <class T> INLINE T base_of(const ringtile_call &c) { return (T)(size_of_scale(c) * 1.44269504088896340736); }
template <class T> INLINE T sign_of(const ringtile_call &c) { return c.options.scale < 0 ? T(-1) : T(c.options.scale != 0); }

// The kept pairs of a tile: a row of bits per key, and the keys that no query keeps. Both can be null. A weight of a score
// of -inf is exactly 0 if a pair is dropped, or if `lows` says that a bias can be -inf.
struct Mask {
    const int32_t *bits;
    int words;
    const uint32_t *unused;
    bool lows = false;

    INLINE bool partial() const { return bits || unused; }
    INLINE bool drops(int key) const { return unused && bit(unused, key); }
    // A tile that serves all lengths may hold only pairs of other queries.
    INLINE bool keeps_nothing(Side keys) const {
        for (int k = keys.low; k < keys.high; k++)
            if (!drops(k)) return false;
        return true;
    }
};

INLINE Mask mask_of(const ringtile_call &c, int64_t b, Side queries, Side keys, int64_t tile, uint32_t *unused) {
    int words = words_of(c);
    bool any = masked_keys(c, b, keys, unused);
    if (tile >= 0) {
        add_unused(c, c.index.cols_any, c.index.bits_t, tile, keys, queries, unused);
        any |= any_of(unused, keys);
    }
    return {tile >= 0 ? c.index.bits_t + tile * c.block * words : nullptr, words, any ? unused : nullptr, c.options.added != nullptr};
}

// The highest of the scores [count][GROUP] of keys that start at `first`. Scores that the mask drops become -inf.
template <class T, int N>
INLINE void highest_scores(T *scores, int first, int count, int lane, const Mask &mask, Vec<T> *top) {
    constexpr int L = Lanes<T>::count;
    const T low = -infinity<T>();
    for (int n = 0; n < N; n++) top[n] = splat<T>(low);
    for (int k = 0; k < count && !mask.partial(); k++)
        for (int n = 0; n < N; n++) top[n] = max<T>(top[n], load(scores + k * GROUP<T> + n * L));
    for (int k = 0; k < count && mask.partial(); k++) {
        bool dropped = mask.drops(first + k);
        for (int n = 0; n < N; n++) {
            T *at = scores + k * GROUP<T> + n * L;
            Vec<T> s = dropped ? splat<T>(low) : load(at);
            if (mask.bits && !dropped)
                s = lanes_of<T>(mask.bits + (first + k) * mask.words, lane + n * L) ? s : splat<T>(low);
            store(at, s);
            top[n] = max<T>(top[n], s);
        }
    }
}

// One step of the online softmax over `count` keys that start at `first`: scores [count][GROUP] become weights.
template <class T, int N>
void online_softmax_step(T *scores, int first, int count, int lane, T base, const Mask &mask, Softmax<T> softmax) {
    constexpr int L = Lanes<T>::count;
    const T low = -infinity<T>();
    const bool partial = mask.partial() || mask.lows;
    Vec<T> share[N], sum[N] = {}, safe[N];
    highest_scores<T, N>(scores, first, count, lane, mask, share);
    bool moved = false;
    for (int n = 0; n < N; n++) {
        T *at = softmax.highest + lane + n * L;
        Vec<T> before = load(at), now = max<T>(before, share[n]);
        store(at, now);
        safe[n] = now == low ? Vec<T>{} : now;
        Ints<T> rose = now > before;
        typename Lanes<T>::integer any = 0;
        for (int i = 0; i < L; i++) any |= rose[i];
        share[n] = exp2<T>((before - safe[n]) * base);
        moved |= any != 0;
    }
    for (int64_t d = 0; d < softmax.value_dim && moved; d++)
        for (int n = 0; n < N; n++) {
            T *at = softmax.sums + d * MAX_BLOCK + lane + n * L;
            store(at, load(at) * share[n]);
        }
    for (int k = 0; k < count; k++)
        for (int n = 0; n < N; n++) {
            T *at = scores + k * GROUP<T> + n * L;
            Vec<T> s = load(at), p = exp2<T>((s - safe[n]) * base);
            if (partial) p = s == low ? Vec<T>{} : p;
            store(at, p);
            sum[n] += p;
        }
    for (int n = 0; n < N; n++) {
        T *at = softmax.total + lane + n * L;
        store(at, load(at) * share[n] + sum[n]);
    }
}

// Zero the weights [count][GROUP] of the pairs that dropout drops. `keep` starts at the first key.
template <class T>
INLINE void drop_weights(T *weights, int count, int vectors, int lane, const uint32_t (*keep)[MAX_WORDS]) {
    constexpr int L = Lanes<T>::count;
    for (int k = 0; k < count; k++)
        for (int n = 0; n < vectors; n++) {
            T *at = weights + k * GROUP<T> + n * L;
            store(at, lanes_of<T>((const int32_t *)keep[k], lane + n * L) ? load(at) : Vec<T>{});
        }
}

// What the policies share whose weights take the place of the scores, [key][GROUP].
template <class T> struct VectorWeights {
    using Unit = VectorUnit;
    static constexpr int LANES = GROUP<T>, LANE_STEP = Lanes<T>::count;

    // The keys that a group of lanes needs.
    INLINE static Reach reach(const Mask &mask, Side queries, Side keys, int lane) {
        return reach_of(mask.bits, mask.words, mask.unused, (int)max(lane, queries.low),
                        (int)min(lane + LANES, queries.high), 0, keys.high);
    }

    // Scores of `count` keys that start at `first` become weights. `keep` are the bits of dropout, or null.
    INLINE static void weigh(int vectors, T *scores, int first, int count, int lane, T base, const Mask &mask,
                             const uint32_t (*keep)[MAX_WORDS], Softmax<T> softmax) {
        with_constant<NR>(vectors, [&](auto n) INLINE_LAMBDA {
            online_softmax_step<T, decltype(n)::value>(scores, first, count, lane, base, mask, softmax);
        });
        if (keep) drop_weights(scores, count, vectors, lane, keep + first);
    }
};

}  // namespace ISA
