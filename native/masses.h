// Softmax weights of rows, summed per segment of keys and pooled over groups of rows: the forward pass without values.
// Rows are in the lanes. A slot is the keys that share a maximum: the segments that fit into a tile, or one segment. Its
// sums stay relative to the maximum of that moment until the row's own is known.
#pragma once
#include "bf16.h"
#include "forward.h"

namespace ISA {

// The keys in segments and slots.
struct Segments {
    int64_t length, keys, slots;  // the keys of a segment and of a slot

    INLINE explicit Segments(const ringtile_call &c)
        : length(c.masses.segment),
          keys(length > MAX_BLOCK ? length : MAX_BLOCK / length * length),
          slots((c.n_keys + keys - 1) / keys) {}

    // The number of segments that the first `n` keys touch.
    INLINE int64_t before(int64_t n) const { return (n + length - 1) / length; }
};

// A strip is up to MAX_BLOCK rows: groups of lanes, each with the sums [segment][GROUP] and maxima [slot][GROUP].
template <class P> struct MassScratch {
    using E = typename P::Element;
    int64_t group_size;
    float *products, *scores, *highest, *sums;
    E *halves;

    static int64_t lanes(const ringtile_call &c) {
        return (min(c.n_queries, MAX_BLOCK) + GROUP<float> - 1) / GROUP<float> * GROUP<float>;
    }
    static int64_t size_of_group(const ringtile_call &c) {
        Segments segments(c);
        return (segments.before(c.n_keys) + segments.slots) * GROUP<float>;
    }
    static int64_t size(const ringtile_call &c) {
        return P::size(c) + (c.head_dim + GROUP<float> + 1) * MAX_BLOCK + lanes(c) / GROUP<float> * size_of_group(c);
    }

    MassScratch(const ringtile_call &c, float *x) : group_size(size_of_group(c)) {
        products = x;
        scores = products + P::size(c);
        highest = scores + GROUP<float> * MAX_BLOCK;
        halves = (E *)(highest + MAX_BLOCK);
        sums = highest + MAX_BLOCK + c.head_dim * MAX_BLOCK;
    }

    INLINE float *sums_of(int group) const { return sums + group * group_size; }
    INLINE float *maxima_of(const ringtile_call &c, int group) const {
        return sums_of(group) + Segments(c).before(c.n_keys) * GROUP<float>;
    }
};

template <int BYTES> struct Bits {
    typedef uint32_t type __attribute__((may_alias));
};
template <> struct Bits<2> {
    typedef uint16_t type __attribute__((may_alias));
};

// The rows of a strip. If the call splits them by sign, a copy: relu(q), then relu(-q), by their bits.
template <class E>
INLINE Rows<E> strip_rows(const ringtile_call &c, const Head &head, Side tokens, E *halves) {
    typedef typename Bits<sizeof(E)>::type bits;
    constexpr int SIGN = 8 * sizeof(E) - 1;
    Rows<E> rows = query_rows<E>(c, head, tokens);
    if (!c.masses.by_sign) return rows;
    const int64_t width = c.head_dim / 2;
    for (int i = 0; i < tokens.high; i++) {
        const bits *from = (const bits *)rows.row(i);
        bits *to = (bits *)(halves + i * c.head_dim);
        for (int64_t d = 0; d < width; d++) {
            const bits x = from[d], negative = (bits)-(x >> SIGN);
            to[d] = x & (bits)~negative;
            to[width + d] = x & negative & (bits)~((bits)1 << SIGN);
        }
    }
    return {halves, c.head_dim};
}

// A tile of keys: what every row may see of it.
struct KeyTile {
    int64_t first;
    int count;
    const float *bias;  // over the scale, or null
    bool continues;     // the tile before belongs to the same slot
};

// Add the bias to the scores [count][GROUP] of a tile and mask them. Return their maxima in `top`. There is no product to
// add to: compilers contract some of them only, and bits would depend on the number of vectors.
template <int N>
INLINE void mask_scores(float *scores, const KeyTile &tile, const int32_t *seen, bool masked, Vec<float> *top) {
    constexpr int L = Lanes<float>::count;
    const float low = -infinity<float>();
    Ints<float> limit[N];
    for (int n = 0; n < N; n++) {
        top[n] = splat<float>(low);
        for (int l = 0; l < L; l++) limit[n][l] = seen[n * L + l] - (int32_t)tile.first;
    }
    for (int k = 0; k < tile.count && !masked; k++)
        for (int n = 0; n < N; n++) top[n] = max<float>(top[n], load(scores + k * GROUP<float> + n * L));
    for (int k = 0; k < tile.count && masked; k++) {
        const float bias = tile.bias ? tile.bias[k] : 0;
        for (int n = 0; n < N; n++) {
            float *at = scores + k * GROUP<float> + n * L;
            Vec<float> s = load(at) + bias;
            s = bias == low ? splat<float>(low) : s;
            s = limit[n] > k ? s : splat<float>(low);
            store(at, s);
            top[n] = max<float>(top[n], s);
        }
    }
}

// Add the weights of a tile to the sums of its segments, which start at the tile's first segment.
template <int N>
void add_tile(float *scores, const KeyTile &tile, const int32_t *seen, float base, bool masked, int64_t segment,
              float *highest, float *maximum, float *sums) {
    constexpr int L = Lanes<float>::count;
    const float low = -infinity<float>();
    Vec<float> top[N], safe[N], share[N];
    mask_scores<N>(scores, tile, seen, masked, top);
    for (int n = 0; n < N; n++) {
        Vec<float> now = max<float>(load(highest + n * L), top[n]);
        store(highest + n * L, now);
        safe[n] = now == low ? Vec<float>{} : now;
        share[n] = tile.continues ? exp2<float>((load(maximum + n * L) - safe[n]) * base) : Vec<float>{};
        store(maximum + n * L, now);
    }
    for (int first = 0; first < tile.count; first += (int)min(segment, MAX_BLOCK), sums += GROUP<float>) {
        const int last = (int)min(first + min(segment, MAX_BLOCK), tile.count);
        Vec<float> sum[N];
        for (int n = 0; n < N; n++) sum[n] = tile.continues ? load(sums + n * L) * share[n] : Vec<float>{};
        for (int k = first; k < last; k++)
            for (int n = 0; n < N; n++) {
                Vec<float> s = load(scores + k * GROUP<float> + n * L), p = exp2<float>((s - safe[n]) * base);
                sum[n] += masked ? (s == low ? Vec<float>{} : p) : p;
            }
        for (int n = 0; n < N; n++) store(sums + n * L, sum[n]);
    }
}

// Bring the sums of all slots to the row's maximum, and return what divides them. Rows that see no key, only
// scores of -inf, or a NaN, get 0.
SHARED Vec<float> share_of(const Segments &segments, int64_t count, const float *highest, const float *maxima,
                           float *sums, float base) {
    const float low = -infinity<float>();
    const int64_t per_slot = segments.keys / segments.length;
    Vec<float> now = load(highest), safe = now == low ? Vec<float>{} : now, total = {};
    for (int64_t first = 0; first < count; first += per_slot, maxima += GROUP<float>) {
        Vec<float> share = exp2<float>((load(maxima) - safe) * base);
        for (int64_t at = first; at < min(first + per_slot, count); at++) {
            Vec<float> sum = load(sums + at * GROUP<float>) * share;
            store(sums + at * GROUP<float>, sum);
            total += sum;
        }
    }
    return (total > 0) & (now != low) ? 1 / total : Vec<float>{};
}

INLINE Vec<float> pooled(Vec<float> a, Vec<float> b, bool highest) { return highest ? max<float>(a, b) : a + b; }

INLINE void pool_into(float *out, Vec<float> x, int count, bool highest) {
    constexpr int L = Lanes<float>::count;
    if (count == L) return store(out, pooled(load(out), x, highest));
    float to[L] = {};
    for (int i = 0; i < count; i++) to[i] = out[i];
    store(to, pooled(load(to), x, highest));
    for (int i = 0; i < count; i++) out[i] = to[i];
}

// Pool the sums of a group of lanes into the output rows that own them, -1 for lanes without one. Means add row by row.
// Maxima of vectors with one owner are found before they are transposed.
SHARED void pool_group(const ringtile_call &c, int64_t count, const float *sums, const Vec<float> *share, int vectors,
                       const int64_t *owner, float *out) {
    constexpr int L = Lanes<float>::count;
    const int64_t width = Segments(c).before(c.n_keys);
    const bool highest = c.masses.pool_max != 0;
    for (int64_t at = 0; at < count; at += L) {
        const int inside = (int)min(L, count - at);
        Vec<float> x[L];
        for (int n = 0, run = 0; n < vectors; n++) {
            const int64_t *owners = owner + n * L;
            const bool one = owners[0] >= 0 && owners[0] == owners[L - 1];
            for (int i = 0; i < L; i++) {
                Vec<float> mass = load(sums + (at + (i < inside ? i : 0)) * GROUP<float> + n * L) * share[n];
                mass = share[n] == 0 ? Vec<float>{} : mass;
                x[i] = run ? pooled(x[i], mass, true) : mass;
            }
            run = highest && one && n + 1 < vectors && owners[2 * L - 1] == owners[0];
            if (run) continue;
            transpose_square<float>(x);
            if (highest && one) {
                for (int half = L / 2; half; half /= 2)
                    for (int i = 0; i < half; i++) x[i] = pooled(x[i], x[i + half], true);
                pool_into(out + owners[0] * width + at, x[0], inside, true);
                continue;
            }
            for (int i = 0; i < L; i++)
                if (owners[i] >= 0) pool_into(out + owners[i] * width + at, x[i], inside, highest);
        }
    }
}

// What each row of a strip sees, and the bias of a tile of keys.
struct SeenKeys {
    int32_t seen[MAX_BLOCK];
    const float *bias;
    float usual, base, scaled[MAX_BLOCK];

    SHARED SeenKeys(const ringtile_call &c, const Head &head, int64_t first, int count, int end) : base(base_of<float>(c)) {
        const int64_t *stride = c.masses.bias_stride;
        for (int lane = 0; lane < end; lane++)
            seen[lane] = lane < count ? (int32_t)min(max(c.masses.seen[first + lane], 0), c.n_keys) : 0;
        bias = c.masses.bias ? c.masses.bias + head.b * stride[0] + head.kv * stride[1] : nullptr;
        // Adding a number to all scores changes nothing, so that most tiles have no bias.
        usual = bias && __builtin_isfinite(bias[0]) ? bias[0] : 0;
    }

    SHARED KeyTile tile(int64_t key, int64_t count, bool continues) {
        KeyTile tile = {key, (int)count, nullptr, continues};
        for (int k = 0; bias && k < count; k++) {
            scaled[k] = (bias[key + k] - usual) * (1.44269504088896340736f / base);
            if (scaled[k] != 0) tile.bias = scaled;
        }
        return tile;
    }
};

// The rows [first, first + count) of a head, pooled into the rows of `out` that own them. Return by `empty` which of them
// are 0.
template <class P>
void mass_strip(const ringtile_call &c, const Head &head, int64_t first, int count, const int64_t *owner, float *out,
                MassScratch<P> &to, bool *empty) {
    constexpr int L = Lanes<float>::count;
    const Segments segments(c);
    const Side tokens = {first, 0, count, 0};
    const int end = (count + L - 1) / L * L;
    P products(c, to.products);
    SeenKeys keys(c, head, first, count, end);
    const auto rows = strip_rows<typename P::Element>(c, head, tokens, to.halves);
    {
        Packing packing(c);
        products.pack(rows, tokens, 0, end, sign_of<float>(c));
    }
    const int32_t *seen = keys.seen;
    int32_t least[MAX_BLOCK / L], most[MAX_BLOCK / L], limit = 0;
    for (int lane = 0; lane < end; lane++) {
        to.highest[lane] = -infinity<float>();
        int32_t &low = least[lane / GROUP<float>], &high = most[lane / GROUP<float>];
        if (lane % GROUP<float> == 0) low = high = seen[lane];
        // Lanes without a row are not read, and need no mask.
        if (lane < count) low = seen[lane] < low ? seen[lane] : low;
        high = seen[lane] > high ? seen[lane] : high;
        limit = high > limit ? high : limit;
    }
    for (int64_t slot = 0; slot * segments.keys < limit; slot++) {
        const int64_t begin = slot * segments.keys, stop = min(begin + segments.keys, limit);
        for (int64_t key = begin; key < stop; key += MAX_BLOCK) {
            const KeyTile tile = keys.tile(key, min(MAX_BLOCK, stop - key), key > begin);
            products.load_tile(head, {key, 0, tile.count, 0}, nullptr);
            for (int lane = 0, group = 0; lane < end; lane += GROUP<float>, group++) {
                if (most[group] <= key) continue;
                const int vectors = (int)min(NR, (end - lane) / L);
                const bool masked = tile.bias || least[group] < key + tile.count;
                products.scores(vectors, lane, 0, tile.count, to.scores);
                with_constant<NR>(vectors, [&](auto n) INLINE_LAMBDA {
                    add_tile<decltype(n)::value>(to.scores, tile, seen + lane, keys.base, masked, segments.length,
                                                 to.highest + lane, to.maxima_of(c, group) + slot * GROUP<float>,
                                                 to.sums_of(group) + key / segments.length * GROUP<float>);
                });
            }
        }
    }
    for (int lane = 0, group = 0; lane < end; lane += GROUP<float>, group++) {
        const int vectors = (int)min(NR, (end - lane) / L);
        const int64_t seen_segments = segments.before(most[group]);
        Vec<float> share[NR];
        for (int n = 0; n < vectors; n++) {
            share[n] = share_of(segments, seen_segments, to.highest + lane + n * L, to.maxima_of(c, group) + n * L,
                                to.sums_of(group) + n * L, keys.base);
            for (int l = 0; l < L; l++) empty[lane + n * L + l] = share[n][l] == 0;
        }
        pool_group(c, seen_segments, to.sums_of(group), share, vectors, owner + lane, out);
    }
}

// `pooled_step` output rows of a head. The last ones come first, because rows that see most are usually there.
template <class P> void mass_item(const ringtile_call &c, int64_t item, float *memory) {
    const int64_t heads = c.batch * c.heads, step = c.masses.pooled_step, items = (c.masses.n_pooled + step - 1) / step;
    const int64_t first = (items - 1 - item / heads) * step, last = min(first + step, c.masses.n_pooled);
    const int64_t width = Segments(c).before(c.n_keys);
    const Head head(c, item % heads);
    MassScratch<P> to(c, memory);
    float *out = c.masses.sums + head.number * c.masses.n_pooled * width;
    for (int64_t i = first * width; i < last * width; i++) out[i] = 0;
    int64_t row = first, counted = 0;
    for (int64_t strip = c.masses.pool_begin[first], end = c.masses.pool_begin[last]; strip < end; strip += MAX_BLOCK) {
        const int count = (int)min(MAX_BLOCK, end - strip);
        int64_t owner[MAX_BLOCK];
        bool empty[MAX_BLOCK];
        for (int lane = 0, at = (int)row; lane < MAX_BLOCK; lane++) {
            while (lane < count && c.masses.pool_begin[at + 1] <= strip + lane) at++;
            owner[lane] = lane < count ? at : -1;
        }
        mass_strip<P>(c, head, strip, count, owner, out, to, empty);
        // Divide the sums of the groups that end in this strip.
        for (int lane = 0; lane < count; lane++) {
            if (owner[lane] != row) row = owner[lane], counted = 0;
            counted += !empty[lane];
            if (c.masses.pool_max || counted < 2 || c.masses.pool_begin[row + 1] != strip + lane + 1) continue;
            for (int64_t i = row * width; i < (row + 1) * width; i++) out[i] /= (float)counted;
        }
    }
}

}  // namespace ISA
