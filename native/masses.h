// Softmax weights of rows, summed per segment of keys and pooled over groups of rows: the forward pass without values.
// With values, the rows have outputs and an lse besides.
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
        : length(c.masses.segment), keys(length > MAX_BLOCK ? length : MAX_BLOCK / length * length),
          slots((c.n_keys + keys - 1) / keys) {}

    // The number of segments that the first `n` keys touch.
    INLINE int64_t before(int64_t n) const { return (n + length - 1) / length; }
};

// A strip is up to MAX_BLOCK rows: groups of lanes, each with the sums [segment][GROUP] and maxima [slot][GROUP]. The
// weighted values of its rows are [value_dim][MAX_BLOCK].
template <class P> struct MassScratch {
    using E = typename P::Element;
    int64_t group_size;
    float *products, *scores, *highest, *sums, *weighted;
    E *halves, *finite;

    static int64_t lanes(const ringtile_call &c) {
        return (min(c.n_queries, MAX_BLOCK) + GROUP<float> - 1) / GROUP<float> * GROUP<float>;
    }
    static int64_t size_of_group(const ringtile_call &c) {
        Segments segments(c);
        return (segments.before(c.n_keys) + segments.slots) * GROUP<float>;
    }
    static int64_t size(const ringtile_call &c) {
        return P::size(c) + (c.head_dim + 2 * c.value_dim + GROUP<float> + 1) * MAX_BLOCK +
               lanes(c) / GROUP<float> * size_of_group(c);
    }

    MassScratch(const ringtile_call &c, float *x) : group_size(size_of_group(c)) {
        products = x;
        scores = products + P::size(c);
        highest = scores + GROUP<float> * MAX_BLOCK;
        weighted = highest + MAX_BLOCK;
        finite = (E *)(weighted + c.value_dim * MAX_BLOCK);
        halves = (E *)(weighted + 2 * c.value_dim * MAX_BLOCK);
        sums = weighted + (2 * c.value_dim + c.head_dim) * MAX_BLOCK;
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

INLINE bool any_lane(Ints<float> x) {
    int32_t any = 0;
    for (int i = 0; i < Lanes<float>::count; i++) any |= x[i];
    return any != 0;
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

// Add the weights of a tile to the sums of its segments, which start at the tile's first segment. If there are values,
// the scores become the weights, and the weighted values [value_dim][MAX_BLOCK] relative to the new maximum.
template <int N, bool VALUES>
void add_tile(float *scores, const KeyTile &tile, const int32_t *seen, float base, bool masked, int64_t segment,
              float *highest, float *maximum, float *sums, float *weighted, int64_t value_dim) {
    constexpr int L = Lanes<float>::count;
    const float low = -infinity<float>();
    Vec<float> top[N], safe[N], share[N], rest[N];
    Ints<float> rose = {};
    mask_scores<N>(scores, tile, seen, masked, top);
    for (int n = 0; n < N; n++) {
        Vec<float> before = load(highest + n * L), now = max<float>(before, top[n]);
        store(highest + n * L, now);
        safe[n] = now == low ? Vec<float>{} : now;
        share[n] = tile.continues ? exp2<float>((load(maximum + n * L) - safe[n]) * base) : Vec<float>{};
        store(maximum + n * L, now);
        if (!VALUES) continue;
        rest[n] = exp2<float>((before - safe[n]) * base);
        rose |= now > before;
    }
    for (int64_t d = 0; VALUES && d < value_dim && any_lane(rose); d++)
        for (int n = 0; n < N; n++) {
            float *at = weighted + d * MAX_BLOCK + n * L;
            store(at, load(at) * rest[n]);
        }
    for (int first = 0; first < tile.count; first += (int)min(segment, MAX_BLOCK), sums += GROUP<float>) {
        const int last = (int)min(first + min(segment, MAX_BLOCK), tile.count);
        Vec<float> sum[N];
        for (int n = 0; n < N; n++) sum[n] = tile.continues ? load(sums + n * L) * share[n] : Vec<float>{};
        for (int k = first; k < last; k++)
            for (int n = 0; n < N; n++) {
                float *at = scores + k * GROUP<float> + n * L;
                Vec<float> s = load(at), p = exp2<float>((s - safe[n]) * base);
                if (masked) p = s == low ? Vec<float>{} : p;
                if (VALUES) store(at, p);
                sum[n] += p;
            }
        for (int n = 0; n < N; n++) store(sums + n * L, sum[n]);
    }
}

// Bring the sums of all slots to the row's maximum, and return their total.
INLINE Vec<float> total_of(const Segments &segments, int64_t count, const float *highest, const float *maxima,
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
    return total;
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
INLINE void pool_group(const ringtile_call &c, int64_t count, const float *sums, const Vec<float> *share, int vectors,
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

// The keys that the lanes of a strip see: those before seen[lane]. By vector, the fewest and the most of its rows. Lanes
// without a row see none, are not read, and need no mask.
struct Sight {
    static constexpr int L = Lanes<float>::count;
    int32_t seen[MAX_BLOCK], least[MAX_BLOCK / L], most[MAX_BLOCK / L], fewest, limit;

    Sight(const ringtile_call &c, int64_t first, int count, int end) : fewest(INT32_MAX), limit(0) {
        for (int lane = 0; lane < end; lane++) {
            seen[lane] = lane < count ? (int32_t)min(max(c.masses.seen[first + lane], 0), c.n_keys) : 0;
            int32_t &low = least[lane / L], &high = most[lane / L];
            if (lane % L == 0) low = high = seen[lane];
            if (lane < count) low = (int32_t)min(low, seen[lane]), fewest = (int32_t)min(fewest, low);
            high = (int32_t)max(high, seen[lane]), limit = (int32_t)max(limit, high);
        }
    }

    // The most of the vectors of lanes [from, to).
    INLINE int32_t most_of(int from, int to) const {
        int32_t found = 0;
        for (int lane = from; lane < to; lane += L) found = (int32_t)max(found, most[lane / L]);
        return found;
    }

    // The first of the vectors [from, to) from which on all rows see the keys before `key`.
    INLINE int all_see(int from, int to, int64_t key) const {
        while (to > from && least[to / L - 1] >= key) to -= L;
        return to;
    }
};

// The bits of infinity. Those of a NaN are larger, if its sign is left out.
template <class E> constexpr uint32_t INFINITE_BITS = sizeof(E) == 4 ? 0x7f800000 : 0x7f80;
template <> constexpr uint32_t INFINITE_BITS<float16> = 0x7c00;

// True if no value is infinite or a NaN. A row that does not see it would add 0 * NaN.
template <class E> INLINE bool all_finite(Rows<E> values, int count, int64_t width) {
    typedef typename Bits<sizeof(E)>::type bits;
    typedef bits lanes __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(E)), may_alias));
    constexpr int W = VECTOR_BYTES / sizeof(E);
    constexpr bits SIZE = (bits)-1 >> 1;
    lanes tops = {};
    bits top = 0;
    for (int k = 0; k < count; k++) {
        const bits *x = (const bits *)values.row(k);
        int64_t d = 0;
        for (; d + W <= width; d += W) {
            const lanes size = *(const lanes *)(x + d) & SIZE;
            tops = size > tops ? size : tops;
        }
        for (; d < width; d++) top = (bits)max(top, x[d] & SIZE);
    }
    for (int l = 0; l < W; l++) top = (bits)max(top, tops[l]);
    return top < INFINITE_BITS<E>;
}

// Copy values, with zeros for those that are not finite.
template <class E> void copy_finite(Rows<E> values, int count, int64_t width, E *to) {
    for (int k = 0; k < count; k++)
        for (int64_t d = 0; d < width; d++) {
            const float x = widen(values.row(k)[d]);
            to[k * width + d] = x - x == 0 ? values.row(k)[d] : E{};
        }
}

// Add the values that `copy_finite` left out to the lanes that see them.
template <class E>
void add_others(Rows<E> values, int64_t width, const KeyTile &tile, const int32_t *seen, int lanes, const float *weights,
                float *weighted) {
    for (int k = 0; k < tile.count; k++)
        for (int64_t d = 0; d < width; d++) {
            const float x = widen(values.row(k)[d]);
            if (x - x == 0 || (tile.bias && tile.bias[k] == -infinity<float>())) continue;
            for (int lane = 0; lane < lanes; lane++)
                if (seen[lane] > tile.first + k) weighted[d * MAX_BLOCK + lane] += weights[k * GROUP<float> + lane] * x;
        }
}

// The rows [first, first + count) of a head.
template <class P> struct Strip {
    using E = typename P::Element;
    static constexpr int L = Lanes<float>::count;
    const ringtile_call &c;
    const Head &head;
    const Segments segments;
    const Side tokens;
    const int end;
    const float base;
    const Sight sight;
    MassScratch<P> &to;
    P products;

    Strip(const ringtile_call &call, const Head &head, int64_t first, int count, MassScratch<P> &scratch)
        : c(call), head(head), segments(c), tokens{first, 0, count, 0}, end((count + L - 1) / L * L),
          base(base_of<float>(c)), sight(c, first, count, end), to(scratch), products(c, to.products) {
        {
            Packing packing(c);
            products.pack(strip_rows<E>(c, head, tokens, to.halves), tokens, 0, end, sign_of<float>(c));
        }
        for (int lane = 0; lane < end; lane++) to.highest[lane] = -infinity<float>();
        for (int64_t d = 0; d < c.value_dim; d++)
            for (int lane = 0; lane < end; lane++) to.weighted[d * MAX_BLOCK + lane] = 0;
    }

    INLINE bool has_values() const { return c.lse != nullptr; }

    // The vectors of a group end at this lane.
    INLINE int end_of(int lane) const { return (int)min(lane + GROUP<float>, end); }

    // Pool the rows into the rows of `out` that own them. Return by `empty` which of them are 0.
    void pool(const int64_t *owner, float *out, bool *empty) {
        const int64_t *stride = c.masses.bias_stride;
        const float *bias = c.masses.bias ? c.masses.bias + head.b * stride[0] + head.kv * stride[1] : nullptr;
        // Adding a number to all scores changes no weight, so that most tiles have no bias.
        const float usual = bias && __builtin_isfinite(bias[0]) ? bias[0] : 0;
        float scaled_bias[MAX_BLOCK];
        for (int64_t slot = 0; slot * segments.keys < sight.limit; slot++) {
            const int64_t begin = slot * segments.keys, stop = min(begin + segments.keys, sight.limit);
            for (int64_t key = begin; key < stop; key += MAX_BLOCK) {
                KeyTile tile = {key, (int)min(MAX_BLOCK, stop - key), nullptr, key > begin};
                for (int k = 0; bias && k < tile.count; k++) {
                    scaled_bias[k] = (bias[key + k] - usual) * (1.44269504088896340736f / base);
                    if (scaled_bias[k] != 0) tile.bias = scaled_bias;
                }
                if (has_values()) add_keys<true>(tile, slot);
                else add_keys<false>(tile, slot);
            }
        }
        finish(owner, usual, out, empty);
    }

    // Add a tile of keys to all rows.
    template <bool VALUES> void add_keys(const KeyTile &tile, int64_t slot) {
        const Side keys = {tile.first, 0, tile.count, 0};
        const Rows<E> key = key_rows<E>(c, head, keys), value = value_rows<E>(c, head, keys);
        const bool hides = tile.bias || sight.fewest < tile.first + tile.count;
        const bool finite = !VALUES || !hides || all_finite(value, tile.count, c.value_dim);
        if (!finite) copy_finite(value, tile.count, c.value_dim, to.finite);
        products.load(key, finite ? value : Rows<E>{to.finite, c.value_dim}, tile.count, nullptr);
        for (int lane = 0, group = 0; lane < end; lane += GROUP<float>, group++) {
            const int last = end_of(lane);
            // Rows that see most usually come last, so vectors at the start of a group are the first that need a mask, and
            // then no more tiles. Of rows 4, 12, ... 508, tile 1 is needed by rows 132 and later, and masked up to row 252.
            int from = lane;
            while (from < last && sight.most[from / L] <= tile.first) from += L;
            if (from == last) continue;
            const int vectors = (last - from) / L;
            float *const scores = to.scores + from - lane;
            KeyTile part = tile;
            part.count = (int)min(tile.count, sight.most_of(from, last) - tile.first);
            const int open = tile.bias ? last : sight.all_see(from, last, tile.first + part.count);
            products.scores(vectors, from, 0, part.count, scores);
            add_vectors<VALUES>(part, slot, group, from, open, true);
            add_vectors<VALUES>(part, slot, group, open, last, false);
            if (!VALUES) continue;
            products.add_values(vectors, 0, part.count, scores, to.weighted + from, Ahead{});
            if (!finite) add_others(value, c.value_dim, part, sight.seen + from, last - from, scores, to.weighted + from);
        }
    }

    // Add the weights of a group's vectors [from, last).
    template <bool VALUES>
    INLINE void add_vectors(const KeyTile &tile, int64_t slot, int group, int from, int last, bool masked) {
        const int at = from % GROUP<float>;
        with_constant<NR>((last - from) / L, [&](auto n) INLINE_LAMBDA {
            add_tile<decltype(n)::value, VALUES>(
                to.scores + at, tile, sight.seen + from, base, masked, segments.length, to.highest + from,
                to.maxima_of(c, group) + slot * GROUP<float> + at,
                to.sums_of(group) + tile.first / segments.length * GROUP<float> + at, to.weighted + from, c.value_dim);
        });
    }

    // Divide by the totals of the rows, pool them, and write their outputs.
    void finish(const int64_t *owner, float usual, float *out, bool *empty) {
        float total[MAX_BLOCK];
        for (int lane = 0, group = 0; lane < end; lane += GROUP<float>, group++) {
            const int vectors = (end_of(lane) - lane) / L;
            const int64_t count = segments.before(sight.most_of(lane, end_of(lane)));
            Vec<float> share[NR];
            for (int n = 0; n < vectors; n++) {
                float *sums = to.sums_of(group) + n * L;
                const int64_t found = segments.before(sight.most[lane / L + n]);
                const float *maxima = to.maxima_of(c, group) + n * L;
                Vec<float> sum = total_of(segments, found, to.highest + lane + n * L, maxima, sums, base);
                // Rows that see no key, or a NaN, get 0.
                share[n] = sum > 0 ? 1 / sum : Vec<float>{};
                store(total + lane + n * L, sum);
                for (int l = 0; l < L; l++) empty[lane + n * L + l] = share[n][l] == 0;
                for (int64_t at = found; at < count; at++) store(sums + at * GROUP<float>, Vec<float>{});
            }
            pool_group(c, count, to.sums_of(group), share, vectors, owner + lane, out);
        }
        if (has_values()) write(total, usual);
    }

    // Write the outputs and lse, as a row tile of the forward pass does.
    void write(const float *total, float usual) {
        float share[MAX_BLOCK] = {};
        float *lse = (float *)c.lse + head.number * c.n_queries + tokens.first;
        const float scale = (float)size_of_scale(c);
        for (int lane = 0; lane < tokens.high; lane++) {
            const float highest = to.highest[lane];
            const bool none = highest == -infinity<float>() && total[lane] == 0;
            share[lane] = none ? 0 : 1 / total[lane];
            lse[lane] = none ? -infinity<float>() : highest * scale + usual + exact_log(total[lane]);
        }
        E *out = (E *)rows_of<E>(c.out, c.out_stride, head.b, head.h, tokens).x;
        transpose_out<E, float>(to.weighted, c.value_dim, 0, tokens.high, share, out, c.out_stride[2]);
    }
};

// `pooled_step` output rows of a head. The last ones come first, because rows that see most are usually there.
template <class P> void mass_item(const ringtile_call &c, int64_t item, float *memory) {
    const int64_t heads = c.batch * c.heads, step = c.masses.pooled_step, items = (c.masses.n_pooled + step - 1) / step;
    const int64_t first = (items - 1 - item / heads) * step, last = min(first + step, c.masses.n_pooled);
    const int64_t width = Segments(c).before(c.n_keys);
    const Head head(c, item % heads);
    MassScratch<P> to(c, memory);
    float *out = c.masses.pooled + head.number * c.masses.n_pooled * width;
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
        Strip<P>(c, head, strip, count, to).pool(owner, out, empty);
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
