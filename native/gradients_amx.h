// The backward pass by tiles. Scores S^T and products dP^T of values and output gradients are [key][query], as scores
// are in the forward pass. Then a column adds dV += P^T dO and dK += dS^T Q, whose sums are [key][dim], and both forms
// of the pass add dQ^T += K^T dS^T, 32 keys after 32 keys, so they agree to the last bit. dS lacks the scale: it
// multiplies the final gradients. Where a mask drops a pair, both P and dS are zero, and tokens that keep no pair are
// zeros in operands along a sum, because 0 * NaN would be NaN.
#pragma once
#include "gradients.h"
#include "products_amx.h"

namespace ISA {

// Two vectors of 16-bit numbers interleaved, in order.
INLINE void interleave(__m512i even, __m512i odd, __m512i *pairs) {
    // Within 128 bits first, which leaves quarters of the result in both halves.
    const __m512i low = _mm512_maskz_unpacklo_epi16(~0u, even, odd), high = _mm512_maskz_unpackhi_epi16(~0u, even, odd);
    pairs[0] = _mm512_permutex2var_epi64(low, _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0), high);
    pairs[1] = _mm512_permutex2var_epi64(low, _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4), high);
}

// Dims in the columns and pairs of tokens along the sum: tiles [32 lanes][16 dims], zeros in lanes without a token and
// in those of `unused`.
INLINE void pack_pairs(Rows<bfloat16> rows, Side side, const uint32_t *unused, int64_t dims, char *tiles) {
    const int64_t row_bytes = round16(dims) / AMX_SIDE * AMX_BYTES;
    for (int lane = side.low / 32 * 32; lane < side.high; lane += 2) {
        const bfloat16 *row[2];
        int64_t count[2];
        for (int i = 0; i < 2; i++) {
            const bool inside = lane + i >= side.low && lane + i < side.high && !bit(unused, lane + i);
            row[i] = inside ? rows.row(lane + i - side.low) : rows.x;
            count[i] = inside ? dims : 0;
        }
        char *to = tiles + lane / 32 * row_bytes + lane % 32 * 32;
        for (int64_t d = 0; d < dims; d += 32, to += 2 * AMX_BYTES) {
            __m512i pairs[2];
            interleave(load_numbers(row[0] + min(d, count[0]), count[0] - d),
                       load_numbers(row[1] + min(d, count[1]), count[1] - d), pairs);
            _mm512_store_si512(to, pairs[0]);
            if (d + AMX_SIDE < dims) _mm512_store_si512(to + AMX_BYTES, pairs[1]);
        }
        // The last of an even count of lanes, where 32 are needed.
        if (lane + 2 >= side.high)
            for (int rest = lane + 2; rest % 32; rest += 2)
                for (int64_t at = 0; at < row_bytes; at += AMX_BYTES)
                    _mm512_store_si512(tiles + lane / 32 * row_bytes + at + rest % 32 * 32, _mm512_setzero_si512());
    }
}

// True if no token of a side that is not in `unused` holds a NaN or infinity, nor a number whose high part is infinite.
template <class E> INLINE bool all_finite(Rows<E> rows, Side side, const uint32_t *unused, int64_t dims) {
    // The sizes of numbers in the upper half of each, so that those of two bfloat16 numbers are in a lane.
    __m512i top[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
    for (int lane = side.low; lane < side.high; lane++) {
        if (bit(unused, lane)) continue;
        const E *row = rows.row(lane - side.low);
        for (int64_t d = 0; d < dims; d += PARTS<E> == 1 ? 32 : 16) {
            __m512i x;
            if constexpr (PARTS<E> == 1) x = load_numbers(row + d, dims - d);
            else x = _mm512_castps_si512(load_floats(row + d, dims - d));
            top[0] = _mm512_maskz_max_epu32(0xffff, top[0], _mm512_and_si512(x, _mm512_set1_epi32(0x7fff0000)));
            if (PARTS<E> == 1) top[1] = _mm512_maskz_max_epu32(0xffff, top[1], (__m512i)((Unsigned)x << 16 & 0x7fff0000));
        }
    }
    const __m512i most = _mm512_maskz_max_epu32(0xffff, top[0], top[1]);
    return !_mm512_cmpge_epu32_mask(most, _mm512_set1_epi32(PARTS<E> == 1 ? 0x7f800000 : 0x7f7f0000));
}

// A row tile in the forms that products read, of numbers in parts the high ones before the low ones.
struct PackedRow {
    char *queries, *grads;            // tiles [strip][32 dims]
    char *query_pairs, *grad_pairs;  // tiles [32 queries][16 dims], for columns only
    float *lse, *delta;              // by lane
};

// The policy (see gradients.h).
template <class E> struct AmxGradients {
    using Element = E;
    using Number = float;
    using Unit = AmxUnit;
    using Tile = GradientTile<float, false>;
    static constexpr bool KEY_LANES = false, COLLECTS = true;
    static constexpr int SPLIT = PARTS<E>;
    // The queries that are multiplied together, and a square of weights of so many queries and keys.
    static constexpr int LANES = 2 * AMX_SIDE, GROUPS = MAX_BLOCK / LANES;
    static constexpr int64_t SQUARE_STEP = GROUPS * AMX_BYTES;
    // Bytes from high parts to low ones.
    static constexpr int64_t SQUARE_PART = MAX_BLOCK / AMX_SIDE * SQUARE_STEP, PAIR_PART = 2 * KEY_TILES * AMX_BYTES;

    const ringtile_call &c;
    const int steps, value_steps;        // of 32 dims
    const int key_width, value_width;    // dims in tiles of 16
    // Of 32 queries: scores, and products of values and output gradients [key][32]. Gradients of scores in pairs of
    // keys, tiles [32 keys][strip]. Then of all queries: weights and gradients of scores, tiles [16 keys][32 queries].
    float *scores, *products, *factors;
    char *slope_pairs, *weights, *slopes;
    bfloat16 *key_copy, *value_copy, *row_copy;
    char *key_tiles, *used_key_tiles;  // of the transpose, [16 dims][32 keys]
    float *query_sums;                 // [d][lane], where the gradients themselves are not in whole tiles
    float *decoded;
    Rows<bfloat16> keys, values;
    bool finite_keys;
    // Row tiles that stay packed from column to column, and what each place holds. A column of more tiles than there
    // are places uses one, because it would only replace what a later one needs.
    static constexpr int MAX_PLACES = 64;
    const int places;
    int used_places;
    char *packed_rows;
    int64_t packed[MAX_PLACES];
    bool finite[MAX_PLACES];
    uint32_t kept[MAX_BLOCK];  // of 32 queries, those that keep each key

    static int64_t packed_size(int64_t dims) { return SPLIT * 16 * steps_of(dims); }
    static int64_t pairs_size(int64_t dims) { return SPLIT * round16(dims) / 2; }
    // Rows of one tensor at a time are split.
    static int64_t copied_size(const ringtile_call &c) {
        return SPLIT == 1 ? 0 : max(packed_size(c.head_dim), packed_size(c.value_dim));
    }
    static int64_t row_size(const ringtile_call &c) {
        return packed_size(c.head_dim) + packed_size(c.value_dim) + pairs_size(c.head_dim) + pairs_size(c.value_dim) + 2;
    }
    // Only a thread that goes through many columns meets a row again. What it keeps is about as large as its caches.
    static int64_t places_of(const ringtile_call &c) {
        const int64_t most = min(MAX_PLACES, (9 << 19) / (row_size(c) * MAX_BLOCK * 4) + 1);
        return c.work.phase == RINGTILE_HEADS ? min(most, c.heads / c.kv_heads * c.index.n_rows) : 1;
    }
    // Keys and a few queries as floats, and their scores.
    static int64_t decoded_size(const ringtile_call &c) {
        return c.head_dim + DECODE_QUERIES * c.head_dim / MAX_BLOCK + 1 + DECODE_QUERIES;
    }
    static int64_t size(const ringtile_call &c) {
        const int64_t copies = packed_size(c.head_dim) + packed_size(c.value_dim) + copied_size(c);
        return (3 * LANES + SPLIT * (LANES / 2 + 2 * 64) + copies + 2 * pairs_size(c.head_dim) +
                round16(c.head_dim) + decoded_size(c) + places_of(c) * row_size(c)) * MAX_BLOCK;
    }

    AmxGradients(const ringtile_call &call, float *memory)
        : c(call), steps((int)steps_of(c.head_dim)), value_steps((int)steps_of(c.value_dim)),
          key_width((int)round16(c.head_dim)), value_width((int)round16(c.value_dim)), keys(), values(),
          finite_keys(), places((int)places_of(c)), used_places(1) {
        const auto take = [&](int64_t count) { return (memory += count * MAX_BLOCK) - count * MAX_BLOCK; };
        scores = take(LANES), products = take(LANES), factors = take(LANES), slope_pairs = (char *)take(SPLIT * LANES / 2);
        weights = (char *)take(SPLIT * 64), slopes = (char *)take(SPLIT * 64);
        key_copy = (bfloat16 *)take(packed_size(c.head_dim)), value_copy = (bfloat16 *)take(packed_size(c.value_dim));
        row_copy = (bfloat16 *)take(copied_size(c));
        key_tiles = (char *)take(pairs_size(c.head_dim)), used_key_tiles = (char *)take(pairs_size(c.head_dim));
        query_sums = take(key_width), decoded = take(decoded_size(c)), packed_rows = (char *)take(0);
        for (int64_t &number : packed) number = -1;
    }

    INLINE PackedRow row_at(int place) const {
        char *x = packed_rows + place * row_size(c) * MAX_BLOCK * 4;
        const auto take = [&](int64_t count) INLINE_LAMBDA {
            return (x += count * MAX_BLOCK * 4) - count * MAX_BLOCK * 4;
        };
        PackedRow row;
        row.queries = take(packed_size(c.head_dim)), row.grads = take(packed_size(c.value_dim));
        row.query_pairs = take(pairs_size(c.head_dim)), row.grad_pairs = take(pairs_size(c.value_dim));
        row.lse = (float *)take(1), row.delta = (float *)take(1);
        return row;
    }

    INLINE void load_keys(const Head &head, Side side) {
        keys = readable(key_rows<E>(c, head, side), side.high, c.head_dim, key_copy);
        values = readable(value_rows<E>(c, head, side), side.high, c.value_dim, value_copy);
    }
    INLINE static Rows<bfloat16> readable(Rows<E> rows, int count, int64_t dims, bfloat16 *to) {
        if constexpr (SPLIT == 1)
            if (in_place(rows, dims, count)) return rows;
        return copy_rows(rows, count, dims, to);
    }

    INLINE void pack_keys(Side side, const uint32_t *unused, char *tiles) {
        for (int part = 0; part < SPLIT; part++)
            pack_transpose(part_of(keys, part), side.high, c.head_dim, unused, tiles + part * pairs_bytes(c.head_dim));
    }

    INLINE void pack_column(const Head &head, Side side, bool with_rows) {
        Packing packing(c);
        load_keys(head, side);
        int64_t rows = 0, ratio = c.heads / c.kv_heads, begin = head.number / ratio * ratio;
        for (int64_t number = begin; number < begin + ratio; number++)
            rows += col_tiles(c, Head(c, number).group * c.index.n_cols + side.first / c.block).length();
        used_places = rows <= places ? places : 1;
        if (!with_rows) return;
        uint32_t unused[MAX_WORDS];
        masked_keys(c, head.b, side, unused);
        finite_keys = all_finite(key_rows<E>(c, head, side), side, unused, c.head_dim);
        pack_keys(side, unused, key_tiles);
    }

    // The queries of a row tile, without those in `unused`.
    INLINE void pack_queries(const PackedRow &row, const Head &head, Side side, const uint32_t *unused,
                             bool with_pairs) {
        const int from = side.low / LANES * LANES, end = (side.high + LANES - 1) / LANES * LANES;
        const auto inside = [&](int lane) INLINE_LAMBDA {
            return lane >= side.low && lane < side.high && !bit(unused, lane);
        };
        const auto pack = [&](Rows<E> from_rows, int64_t dims, char *packed, char *pairs) INLINE_LAMBDA {
            Rows<bfloat16> rows;
            if constexpr (SPLIT == 1) rows = from_rows;
            else rows = copy_rows(from_rows, side.high - side.low, dims, row_copy);
            for (int part = 0; part < SPLIT; part++) {
                char *const to = packed + part * lanes_bytes(dims) + from / AMX_SIDE * AMX_BYTES * steps_of(dims);
                pack_lanes(part_of(rows, part), side.low, from, end, dims, 0, inside, to);
                if (!with_pairs) continue;
                pack_pairs(part_of(rows, part), side, unused, dims, pairs + part * pairs_bytes(dims));
            }
        };
        pack(query_rows<E>(c, head, side), c.head_dim, row.queries, row.query_pairs);
        pack(out_grad_rows<E>(c, head, side), c.value_dim, row.grads, row.grad_pairs);
        for (int lane = from; lane < end; lane++) {
            row.lse[lane] = inside(lane) ? lse_of<float>(c, head)[side.first + lane] : infinity<float>();
            row.delta[lane] = inside(lane) ? delta_of<float>(c, head)[side.first + lane] : 0;
        }
    }

    // The queries that keep no key at all.
    INLINE void lone_queries(const Head &head, Side side, uint32_t *unused) const {
        for (int w = 0; w < MAX_WORDS; w++) unused[w] = 0;
        const float *lse = lse_of<float>(c, head) + side.first;
        for (int lane = side.low; lane < side.high; lane++)
            unused[lane >> 5] |= (uint32_t)(lse[lane] == infinity<float>()) << (lane & 31);
    }

    INLINE PackedRow packed_row(const Tile &tile) {
        const Side side = tile.queries;
        const int64_t number = tile.head.number * c.index.n_rows + (side.first + c.block) / c.block;
        const int place = (int)(number % used_places);
        const PackedRow row = row_at(place);
        if (packed[place] == number && (finite[place] || !tile.any_queries)) return row;
        Packing packing(c);
        uint32_t unused[MAX_WORDS];
        lone_queries(tile.head, side, unused);
        packed[place] = number;
        finite[place] = all_finite(query_rows<E>(c, tile.head, side), side, unused, c.head_dim) &&
                        all_finite(out_grad_rows<E>(c, tile.head, side), side, unused, c.value_dim);
        if (!finite[place] && tile.any_queries) packed[place] = -1;
        pack_queries(row, tile.head, side, packed[place] < 0 ? tile.unused_queries : unused, true);
        return row;
    }

    // Add to sums [key][dim] of keys and values, and to the gradients of queries [d][query] unless they are null.
    INLINE void column_tile(const Tile &tile, float *key_sums, float *value_sums, float *query_grad) {
        const Side side = tile.queries;
        const int count = side.high - side.low;
        const PackedRow row = packed_row(tile);
        const char *own_keys = key_tiles;
        if (query_grad && tile.any_keys && !finite_keys) {
            Packing packing(c);
            pack_keys(tile.keys, tile.unused_keys, used_key_tiles);
            own_keys = used_key_tiles;
        }
        const bool direct = side.low % LANES == 0 && side.high % AMX_SIDE == 0 && c.head_dim % AMX_SIDE == 0;
        if (query_grad && !direct) (void)collected(side, query_grad);
        uint32_t groups[MAX_BLOCK / AMX_KEYS] = {};  // those of the queries that need 32 keys
        for (int lane = side.low / LANES * LANES; lane < side.high; lane += LANES) {
            const Reach reach =
                query_grad ? slopes_of<true, true>(tile, row, lane) : slopes_of<true, false>(tile, row, lane);
            for (int key = reach.first; key < reach.last; key += AMX_KEYS)
                groups[key / AMX_KEYS] |= 1u << lane / LANES;
            if (reach.first >= reach.last) continue;
            if (!query_grad) continue;
            if (direct) add_to_queries(own_keys, reach, side.high - lane, query_grad + lane - side.low, count);
            else add_to_queries(own_keys, reach, side.high - lane, query_sums + lane, MAX_BLOCK);
        }
        for (int block = 0; block < MAX_BLOCK / AMX_KEYS; block++) {
            if (!groups[block]) continue;
            const int first = __builtin_ctz(groups[block]), last = 32 - __builtin_clz(groups[block]);
            for (int group = first; group < last; group++)
                if (!(groups[block] >> group & 1)) clear_square(block, group);
            const int rows = tile.keys.high > block * AMX_KEYS + AMX_SIDE ? 2 : 1;
            add_to_keys(weights, row.grad_pairs, value_width, value_sums, block, rows, first, last - first);
            add_to_keys(slopes, row.query_pairs, key_width, key_sums, block, rows, first, last - first);
        }
        for (int64_t d = 0; query_grad && !direct && d < c.head_dim; d++)
            __builtin_memcpy(query_grad + d * count, query_sums + d * MAX_BLOCK + side.low, count * 4);
    }

    // Gradients of queries [d][query] as sums [d][lane].
    INLINE const float *collected(Side side, const float *grad) {
        const int count = side.high - side.low;
        for (int64_t d = 0; d < c.head_dim; d++)
            __builtin_memcpy(query_sums + d * MAX_BLOCK + side.low, grad + d * count, count * 4);
        return query_sums;
    }
    INLINE static float query_factor(const ringtile_call &c) { return (float)c.options.scale; }

    INLINE void pack_row(const Head &head, Side side) {
        Packing packing(c);
        uint32_t unused[MAX_WORDS];
        lone_queries(head, side, unused);
        pack_queries(row_at(0), head, side, unused, false);
    }

    INLINE void row_tile(const Tile &tile, float *sums) {
        const int low = tile.queries.low, high = tile.queries.high;
        {
            Packing packing(c);
            load_keys(tile.head, tile.keys);
            pack_keys(tile.keys, tile.unused_keys, key_tiles);
        }
        for (int lane = low / LANES * LANES; lane < high; lane += LANES) {
            const Reach reach = slopes_of<false, true>(tile, row_at(0), lane);
            if (reach.first < reach.last) add_to_queries(key_tiles, reach, high - lane, sums + lane, MAX_BLOCK);
        }
    }

    // Weights and gradients of scores of the 32 queries from `lane` on, for COLUMNS, for ROWS or both. Return the keys,
    // in whole squares, or none.
    template <bool COLUMNS, bool ROWS> INLINE Reach slopes_of(const Tile &tile, const PackedRow &row, int lane) {
        const Side side = tile.queries;
        const int n_keys = tile.keys.high;
        const bool plain = !tile.bits && !tile.any_keys && !tile.lone && !c.options.dropout_threshold && n_keys % AMX_KEYS == 0;
        Reach reach = {0, n_keys};
        if (!plain) {
            const int low = (int)max(0, side.low - lane), high = (int)min(LANES, side.high - lane);
            const uint32_t inside =
                (uint32_t)(((uint64_t)1 << high) - ((uint64_t)1 << low)) & ~tile.unused_queries[lane / LANES];
            const Mask mask = {tile.bits, tile.words, tile.any_keys ? tile.unused_keys : nullptr};
            reach = keys_of_lanes(mask, lane, inside, n_keys, kept);
            if (reach.first >= reach.last) return reach;
            for (int k = (n_keys + AMX_SIDE - 1) / AMX_SIDE * AMX_SIDE; k % AMX_KEYS; k++) kept[k] = 0;
        }
        const int first = reach.first / AMX_KEYS * AMX_KEYS, rows = (reach.last - first + AMX_SIDE - 1) / AMX_SIDE;
        const int strip = lane / AMX_SIDE;
        const bool both = side.high - lane > AMX_SIDE;
        const auto tokens = [&](Rows<bfloat16> x) INLINE_LAMBDA {
            return AmxTilesAt{(char *)x.row(first), 2 * x.step, AMX_SIDE * 2 * x.step, 64, 2 * MAX_BLOCK * x.step};
        };
        const auto lanes = [&](char *x, int64_t dims) INLINE_LAMBDA {
            const int64_t row = steps_of(dims) * AMX_BYTES;
            return AmxTilesAt{x + strip * row, 64, row, AMX_BYTES, lanes_bytes(dims)};
        };
        if (decodes<float>(c, side)) decode(tile, lane, first, rows);
        else multiply(both, tokens(keys), lanes(row.queries, c.head_dim), scores, rows, steps);
        if (transforms(c)) tile.transform(c, scores, factors, LANES, LANES / AMX_SIDE, rows * AMX_SIDE, first, lane);
        multiply(both, tokens(values), lanes(row.grads, c.value_dim), products, rows, value_steps);
        reach = {first, (reach.last + AMX_KEYS - 1) / AMX_KEYS * AMX_KEYS};
        if (plain) weigh<false, false, COLUMNS, ROWS>(tile, row, lane, reach);
        else if (!c.options.dropout_threshold) weigh<true, false, COLUMNS, ROWS>(tile, row, lane, reach);
        else weigh<true, true, COLUMNS, ROWS>(tile, row, lane, reach);
        return reach;
    }

    // The scores of a few queries: those of the forward pass, which multiplies them without tiles.
    INLINE void decode(const Tile &tile, int lane, int first, int rows) {
        const Side side = tile.queries, others = tile.keys;
        const int count = side.high - side.low;
        uint32_t unused = 0;
        for (int i = 0; i < count; i++) unused |= bit(tile.unused_queries, side.low + i) << i;
        float *const own_keys = decoded + DECODE_QUERIES * MAX_BLOCK, *const own_queries = own_keys + c.head_dim * MAX_BLOCK;
        copy_in(query_rows<E>(c, tile.head, side), count, c.head_dim, c.head_dim, &unused, own_queries);
        copy_in(key_rows<E>(c, tile.head, others), others.high, c.head_dim, c.head_dim, nullptr, own_keys);
        decode_scores<float>({own_queries, c.head_dim}, count, {own_keys, c.head_dim}, others.high, c.head_dim, decoded);
        clear(scores, rows * AMX_SIDE * LANES);
        for (int k = first; k < others.high && k < first + rows * AMX_SIDE; k++)
            for (int i = 0; i < count; i++) {
                const int at = side.low + i - lane;
                if (at >= 0 && at < LANES) scores[(k - first) * LANES + at] = decoded[i * MAX_BLOCK + k];
            }
    }

    // Products of 32 queries, or of 16 and zeros.
    INLINE static void multiply(bool both, AmxTilesAt a, AmxTilesAt b, float *y, int rows, int count) {
        const AmxTilesAt to = {(char *)y, 4 * LANES, AMX_SIDE * 4 * LANES, 64};
        if (both) return multiply_rows<2, false, SPLIT>(a, b, to, rows, count);
        multiply_rows<1, false, SPLIT>(a, b, to, rows, count);
        for (int k = 0; k < rows * AMX_SIDE; k++) _mm512_store_ps(y + k * LANES + AMX_SIDE, _mm512_setzero_ps());
    }

    template <bool MASKED, bool DROPS, bool COLUMNS, bool ROWS>
    void weigh(const Tile &tile, const PackedRow &row, int lane, Reach reach) {
        const int group = lane / LANES;
        const float scale = (float)c.options.scale;
        const __m512 share = _mm512_set1_ps((float)(65536.0 / (65536 - c.options.dropout_threshold)));
        Vec<float> lse[2];
        __m512 delta[2];
        for (int n = 0; n < 2; n++) {
            lse[n] = load(row.lse + lane + n * AMX_SIDE);
            delta[n] = _mm512_load_ps(row.delta + lane + n * AMX_SIDE);
        }
        const float *score = scores, *product = products, *factor = transforms(c) ? factors : nullptr;
        char *const to_weights = weights + group * AMX_BYTES, *const to_slopes = slopes + group * AMX_BYTES;
        char *const to_pairs = slope_pairs;
        for (uint32_t key = (uint32_t)reach.first; key < (uint32_t)reach.last; key += 2) {
            Numbers slope_row[2];
#pragma GCC unroll 2
            for (uint32_t i = 0; i < 2; i++) {
                __m512 weight[2], slope[2];
                const uint32_t keep = MASKED ? kept[key + i] : 0;
                const uint32_t stays = DROPS ? tile.keep[key + i][group] : 0;
                opaque(factor);
#pragma GCC unroll 2
                for (int n = 0; n < 2; n++, score += AMX_SIDE, product += AMX_SIDE) {
                    const __m512 p = exp2_of<E>((__m512)exponent_of<float>(load(score), scale, lse[n]));
                    const __mmask16 alive = (__mmask16)(keep >> n * AMX_SIDE);
                    const __mmask16 left = (__mmask16)(stays >> n * AMX_SIDE);
                    __m512 g = _mm512_load_ps(product);
                    if (DROPS) g = _mm512_maskz_mul_ps(left, g, share);
                    g = _mm512_sub_ps(g, delta[n]);
                    if (factor) g = _mm512_mul_ps(g, _mm512_load_ps(factor + (product - products)));
                    slope[n] = MASKED ? _mm512_maskz_mul_ps(alive, p, g) : _mm512_mul_ps(p, g);
                    weight[n] = DROPS ? _mm512_maskz_mul_ps(alive & left, p, share)
                                : MASKED ? _mm512_maskz_mov_ps(alive, p) : p;
                }
                slope_row[i] = numbers_of(slope[0], slope[1]);
                if (!COLUMNS) continue;
                const int64_t at = (key + i) / AMX_SIDE * SQUARE_STEP + (key + i) % AMX_SIDE * 64;
                const Numbers weight_row = numbers_of(weight[0], weight[1]);
                for (int part = 0; part < SPLIT; part++) {
                    _mm512_store_si512(to_weights + part * SQUARE_PART + at, weight_row.part[part]);
                    _mm512_store_si512(to_slopes + part * SQUARE_PART + at, slope_row[i].part[part]);
                }
            }
            for (int part = 0; ROWS && part < SPLIT; part++) {
                __m512i pairs[2];
                interleave(slope_row[0].part[part], slope_row[1].part[part], pairs);
                char *const to = to_pairs + part * PAIR_PART + key / AMX_KEYS * 2 * AMX_BYTES + key % AMX_KEYS * 32;
                _mm512_store_si512(to, pairs[0]);
                _mm512_store_si512(to + AMX_BYTES, pairs[1]);
            }
        }
    }

    struct Numbers {
        __m512i part[SPLIT];
    };
    INLINE static Numbers numbers_of(__m512 first, __m512 second) {
        if constexpr (SPLIT == 1) return {{narrowed(first, second)}};
        else {
            const Parts parts = parts_of(first, second);
            return {{parts.high, parts.low}};
        }
    }

    INLINE void clear_square(int block, int group) {
        for (int half = 0; half < 2 * SPLIT; half++) {
            const int64_t at = half / 2 * SQUARE_PART + (2 * block + half % 2) * SQUARE_STEP + group * AMX_BYTES;
            __builtin_memset(weights + at, 0, AMX_BYTES);
            __builtin_memset(slopes + at, 0, AMX_BYTES);
        }
    }

    // Sums [d][query] += K^T dS^T, for up to 32 queries.
    INLINE void add_to_queries(const char *tiles, Reach reach, int lanes, float *sums, int64_t step) {
        const int block = reach.first / AMX_KEYS, count = (reach.last - reach.first) / AMX_KEYS;
        const AmxTilesAt a = {(char *)tiles + block * AMX_BYTES, 64, KEY_TILES * AMX_BYTES, AMX_BYTES,
                           pairs_bytes(c.head_dim)};
        const AmxTilesAt b = {slope_pairs + block * 2 * AMX_BYTES, 64, AMX_BYTES, 2 * AMX_BYTES, PAIR_PART};
        const AmxTilesAt to = {(char *)sums, 4 * step, AMX_SIDE * 4 * step, 64};
        if (lanes > AMX_SIDE) multiply_rows<2, true, SPLIT>(a, b, to, key_width / AMX_SIDE, count);
        else multiply_rows<1, true, SPLIT>(a, b, to, key_width / AMX_SIDE, count);
    }

    // Sums [key][dim] of the 32 keys of a block += weights or gradients of scores * packed pairs of queries.
    INLINE static void add_to_keys(char *x, char *pairs, int width, float *sums, int block, int rows, int first,
                                   int count) {
        const int64_t row_bytes = width / AMX_SIDE * AMX_BYTES;
        char *const squares = x + 2 * block * SQUARE_STEP + first * AMX_BYTES;
        const AmxTilesAt a = {squares, 64, SQUARE_STEP, AMX_BYTES, SQUARE_PART};
        AmxTilesAt b = {pairs + first * row_bytes, 64, AMX_BYTES, row_bytes, pairs_bytes(width)};
        AmxTilesAt to = {(char *)(sums + block * AMX_KEYS * width), 4 * width, AMX_SIDE * 4 * width, 64};
        for (; width >= 2 * AMX_SIDE; width -= 2 * AMX_SIDE, b.x += 2 * AMX_BYTES, to.x += 2 * 64)
            multiply_rows<2, true, SPLIT>(a, b, to, rows, count);
        if (width) multiply_rows<1, true, SPLIT>(a, b, to, rows, count);
    }

    // The rows of tiles that hold keys.
    INLINE static void clear_column(const ringtile_call &c, Side side, float *sums) {
        const int64_t rows = (side.high + AMX_SIDE - 1) / AMX_SIDE * AMX_SIDE;
        clear(sums, rows * round16(c.head_dim));
        clear(sums + key_numbers(c), rows * round16(c.value_dim));
    }

    static void write_column(const ringtile_call &c, const Head &head, Side side, const float *sums) {
        const int64_t at = (head.b * c.kv_heads + head.kv) * c.n_keys + side.first;
        write_keys(sums, side.high, c.head_dim, (float)c.options.scale, (E *)c.backward.k_grad + at * c.head_dim);
        write_keys(sums + key_numbers(c), side.high, c.value_dim, 1, (E *)c.backward.v_grad + at * c.value_dim);
    }
    INLINE static void write_keys(const float *sums, int count, int64_t dims, float factor, E *rows) {
        for (int k = 0; k < count; k++, sums += round16(dims), rows += dims)
            for (int64_t d = 0; d < dims; d += AMX_SIDE) {
                E numbers[AMX_SIDE];
                store_narrow<E, float>(numbers, load(sums + d) * factor);
                __builtin_memcpy(rows + d, numbers, sizeof(E) * min(AMX_SIDE, dims - d));
            }
    }
};

}  // namespace ISA
