// The best entries of rows of scores. The bits of floats have the order of their numbers, so digits of them are counted, from
// the highest one on, and only the entries of the digit in which a choice ends have their next counted.
#pragma once
#include "platform.h"
#include "simd.h"

namespace ISA {

constexpr int DIGIT_BITS = 11, DIGITS = 1 << DIGIT_BITS, RANKED = 256, SHIFTS[] = {21, 10, 0};
constexpr int32_t LOWEST = (int32_t)0x807fffff;  // the key of -inf, alone in its highest digit

struct Entry {
    int32_t key, number;
};

// Larger numbers have larger keys. Both zeros have the same, and all NaNs the largest.
INLINE Ints<float> keys_of(Vec<float> x) {
    const Ints<float> bits = (Ints<float>)(x + 0.0f), size = bits & INT32_MAX;
    return size > 0x7f800000 ? Ints<float>{} + INT32_MAX : bits ^ (bits >> 31 & INT32_MAX);
}
INLINE int32_t key_of(float x) { return keys_of(splat<float>(x))[0]; }

INLINE float number_of(int32_t key) {
    const int32_t bits = key ^ (key >> 31 & INT32_MAX);
    float x;
    __builtin_memcpy(&x, &bits, 4);
    return x;
}

INLINE uint32_t digit_of(int32_t key, int shift) {
    return ((uint32_t)key >> shift ^ 1u << (31 - shift)) & (DIGITS - 1);
}

// Write the keys of up to RANKED scores, those of -inf behind them, and return the largest.
INLINE int32_t write_keys(const float *x, int64_t count, int32_t *keys) {
    constexpr int L = Lanes<float>::count;
    float some[RANKED];
    if (count < RANKED) {
        for (int i = 0; i < RANKED; i++) some[i] = i < count ? x[i] : -infinity<float>();
        x = some;
    }
    Ints<float> most = Ints<float>{} + LOWEST;
    for (int i = 0; i < RANKED; i += L) {
        const Ints<float> own = keys_of(load(x + i));
        __builtin_memcpy(keys + i, &own, sizeof(own));
        most = most > own ? most : own;
    }
    for (int l = 1; l < L; l++) most[0] = most[0] > most[l] ? most[0] : most[l];
    return most[0];
}

// Append the numbers of the keys that are at least `low`, which begin with `first`. Others are written behind them, where
// there is room for RANKED. Return how many there are now.
INLINE int64_t append(const int32_t *keys, int32_t low, int64_t first, int32_t *places, int64_t count) {
#if defined(__AVX512F__)
    __m512i number = _mm512_add_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0),
                                      _mm512_set1_epi32((int32_t)first));
    for (int i = 0; i < RANKED; i += 16, number = _mm512_add_epi32(number, _mm512_set1_epi32(16))) {
        const __mmask16 is_high = _mm512_cmpge_epi32_mask(_mm512_loadu_si512(keys + i), _mm512_set1_epi32(low));
        _mm512_storeu_si512(places + count, _mm512_maskz_compress_epi32(is_high, number));
        count += __builtin_popcount(is_high);
    }
#else
    for (int i = 0; i < RANKED; i++) {
        places[count] = (int32_t)(first + i);
        count += keys[i] >= low;
    }
#endif
    return count;
}

// The digit of the n-th entry from the highest digit on.
INLINE uint32_t digit_at(const uint32_t *counts, int64_t n) {
    int digit = DIGITS - 1;
    for (int64_t above = 0; (above += counts[digit]) < n; digit--) {}
    return (uint32_t)digit;
}

// Sort entries by their keys, the largest first, and equal ones as they are. Return where they are: here or in `room`.
SHARED Entry *in_order(Entry *x, Entry *room, int64_t count) {
    for (int level = 2; level >= 0; level--) {
        uint32_t begin[DIGITS] = {}, sum = 0;
        for (int64_t i = 0; i < count; i++) begin[digit_of(x[i].key, SHIFTS[level])]++;
        for (int digit = DIGITS - 1; digit >= 0; digit--) {
            const uint32_t own = begin[digit];
            begin[digit] = sum, sum += own;
        }
        for (int64_t i = 0; i < count; i++) room[begin[digit_of(x[i].key, SHIFTS[level])]++] = x[i];
        Entry *from = x;
        x = room, room = from;
    }
    return x;
}

// The n best of a row. There is room for `entries` places and RANKED more, and for n entries twice, or for all if there are
// fewer.
SHARED void best_row(const float *x, int64_t entries, int64_t n, float *values, int32_t *numbers, int32_t *places,
                     Entry *chosen, Entry *room) {
    // Equal digits often follow one another: two counters wait for each other half as often.
    uint32_t counts[2][DIGITS] = {};
    int32_t keys[RANKED];
    for (int64_t first = 0; first < entries; first += RANKED) {
        if (write_keys(x + first, entries - first, keys) == LOWEST) continue;
        for (int i = 0; i < RANKED; i += 2) {
            counts[0][(keys[i] >> SHIFTS[0]) + DIGITS / 2]++;
            counts[1][(keys[i + 1] >> SHIFTS[0]) + DIGITS / 2]++;
        }
    }
    int64_t total = 0, found = 0, left = 0;
    counts[0][digit_of(LOWEST, SHIFTS[0])] = counts[1][digit_of(LOWEST, SHIFTS[0])] = 0;
    for (int digit = 0; digit < DIGITS; digit++) total += counts[0][digit] += counts[1][digit];
    const int64_t wanted = total < n ? total : n;
    const int32_t low = wanted ? (int32_t)(digit_at(counts[0], wanted) << SHIFTS[0] ^ 0x80000000u) : INT32_MAX;
    for (int64_t first = 0; wanted && first < entries; first += RANKED)
        if (write_keys(x + first, entries - first, keys) >= low) left = append(keys, low, first, places, left);
    for (int level = 0; level < 3 && found < wanted; level++) {
        if (level) {
            for (int digit = 0; digit < DIGITS; digit++) counts[0][digit] = 0;
            for (int64_t i = 0; i < left; i++) counts[0][digit_of(key_of(x[places[i]]), SHIFTS[level])]++;
        }
        const uint32_t last = digit_at(counts[0], wanted - found);
        int64_t equal = 0;
        for (int64_t i = 0; i < left; i++) {
            const Entry entry = {key_of(x[places[i]]), places[i]};
            const uint32_t digit = digit_of(entry.key, SHIFTS[level]);
            // Which of them is not predictable.
            chosen[found] = entry, found += digit > last;
            places[equal] = entry.number, equal += digit == last;
        }
        left = equal;
    }
    // Equal scores, of which those with the smallest numbers are chosen.
    for (int64_t i = 0; found < wanted; i++) chosen[found++] = {key_of(x[places[i]]), places[i]};
    const Entry *best = in_order(chosen, room, found);
    for (int64_t i = 0; i < n; i++) {
        values[i] = number_of(i < found ? best[i].key : LOWEST);
        numbers[i] = i < found ? best[i].number : -1;
    }
}

inline int best(int threads, int64_t rows, int64_t entries, int64_t stride, int64_t n, const float *scores, float *values,
                int32_t *numbers) {
    const int64_t most = n < entries ? n : entries, bytes = (entries + RANKED) * 4 + 2 * most * (int64_t)sizeof(Entry);
    struct Work {
        int64_t rows, entries, stride, n, most, bytes;
        const float *scores;
        float *values;
        int32_t *numbers;
        int64_t next;
        int failed;
    } work = {rows, entries, stride, n, most, (bytes + 63) / 64 * 64, scores, values, numbers, 0, 0};
    auto body = [](void *data) {
        Work &work = *(Work *)data;
        Entry *memory = (Entry *)allocate_aligned(work.bytes);
        if (!memory) __atomic_store_n(&work.failed, 1, __ATOMIC_RELAXED);
        int64_t row;
        while (memory && (row = __atomic_fetch_add(&work.next, 1, __ATOMIC_RELAXED)) < work.rows)
            best_row(work.scores + row * work.stride, work.entries, work.n, work.values + row * work.n,
                     work.numbers + row * work.n, (int32_t *)(memory + 2 * work.most), memory, memory + work.most);
        free_aligned(memory);
    };
    ringtile_parallel(threads, body, &work);
    return work.failed;
}

}  // namespace ISA
