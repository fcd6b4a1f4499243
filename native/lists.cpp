// The kept tiles of an index's lists, and lists of keys in order, for any processor.
#include "platform.h"

// Copy the tiles of each slot's list that a mask keeps, and return their number. There are `groups` of `slots`
// slots in `heads` per batch element; group g has the lists of group base[g] of the index. The mask's strides are those
// of batch elements, heads, slots and the tiles of a list. TileCursor beyond `capacity` are counted, and places behind the
// last tile are zeros. A list of full tiles has no `tile`. Without `kept_other`, tiles are only counted.
PUBLIC int64_t ringtile_kept(int64_t groups, int64_t heads, int64_t slots, const int32_t *base, const int32_t *pointer,
                             const int32_t *other, const int32_t *tile, const uint8_t *mask, const int64_t *strides,
                             int64_t capacity, int32_t *kept_pointer, int32_t *kept_other, int32_t *kept_tile) {
    int64_t found = 0;
    kept_pointer[0] = 0;
    for (int64_t slot = 0; slot < groups * slots; slot++) {
        int64_t group = slot / slots, place = slot % slots;
        const uint8_t *keep = mask + group / heads * strides[0] + group % heads * strides[1] + place * strides[2];
        const int32_t *begin = pointer + base[group] * slots + place;
        for (int64_t i = begin[0]; i < begin[1]; i++) {
            // Written whether it is kept or not: the next one takes its place.
            if (kept_other && found < capacity) {
                kept_other[found] = other[i];
                if (tile) kept_tile[found] = tile[i];
            }
            found += keep[other[i] * strides[3]] != 0;
        }
        kept_pointer[slot + 1] = (int32_t)found;
    }
    for (int64_t i = found; kept_other && i < capacity; i++) {
        kept_other[i] = 0;
        if (tile) kept_tile[i] = 0;
    }
    return found;
}

// Write the numbers of each row in [0, count), ascending and each once, then -1. `bits` are count / 64 + 1 zeros, and are
// zeros again at the end.
PUBLIC void ringtile_ascending(int64_t rows, int64_t length, int64_t count, const int32_t *x, uint64_t *bits, int32_t *y) {
    for (int64_t row = 0; row < rows; row++, x += length, y += length) {
        int64_t found = 0;
        for (int64_t i = 0; i < length; i++)
            if (x[i] >= 0 && x[i] < count) bits[x[i] >> 6] |= (uint64_t)1 << (x[i] & 63);
        for (int64_t word = 0; word <= count >> 6; bits[word++] = 0)
            for (uint64_t left = bits[word]; left; left &= left - 1) y[found++] = (int32_t)(word << 6) + __builtin_ctzll(left);
        while (found < length) y[found++] = -1;
    }
}
