"""Parts of the kernels that handle one tile: its mask, its dropout, its position in a list.

In Triton's language, shapes are those of tiles in registers, and ``tl.constexpr`` arguments are compiled in.
"""

import triton
import triton.language as tl
from triton.language.random import philox_impl

CHANGING = (
    *("threshold", "heads", "ratio", "n_queries", "n_keys", "start", "first_row", "n_rows", "n_cols", "longest"),
    *("scratch_stride", "whole_base", "room", "key_words", "size", "group_b", "group_h"),
)
"""Values that do not cause a new compilation: each of them would make two or three variants of every kernel. Only dK/dV
specializes on those that tell how statistics are aligned: unaligned reads would cost a fifth more instructions."""


@triton.jit
def expanded(words, ROWS: tl.constexpr, COLS: tl.constexpr, BY_SIGN: tl.constexpr):
    """Return ``[ROWS, COLS // 32]`` words as bits ``[ROWS, COLS]``.

    A thread of the matrix units has columns 2 t, 2 t + 1, 2 t + 8 and so on: it shifts a word once, by 2 t, and then
    tests constant bits. BY_SIGN: for bits that a maximum follows. LLVM would pack constant bits into vectors there.
    """
    bit = tl.arange(0, 32)
    if BY_SIGN:
        shifted = words[:, :, None] << (6 - (bit & 6))[None, None, :]
        return tl.reshape(shifted << (25 - (bit & 25))[None, None, :], [ROWS, COLS]) < 0
    else:
        shifted = words[:, :, None] >> (bit & 6)[None, None, :]
        return tl.reshape(shifted & (1 << (bit & 25))[None, None, :], [ROWS, COLS]) != 0


@triton.jit
def expanded_row(words, COLS: tl.constexpr):
    """Return ``[COLS // 32]`` words as bits ``[COLS]``."""
    return tl.reshape((words[:, None] >> tl.arange(0, 32)[None, :]) & 1, [COLS]) != 0


@triton.jit
def _either(a, b):
    return a | b


@triton.jit
def seen_by(words, exists):
    """The bits that the rows that exist keep, as words: sets of a whole tile also count the rows beyond the lengths."""
    return tl.reduce(tl.where(exists[:, None], words, 0), 0, _either)


@triton.jit
def online_softmax_step(s, c, top, total, acc, MASKED: tl.constexpr):
    """Weights of scores, with maxima, sums and outputs brought up to date. MASKED: a row may have no score yet."""
    new_top = tl.maximum(top, tl.max(s, 1))
    used_top = new_top
    if MASKED:
        used_top = tl.where(new_top == float("-inf"), 0.0, new_top)
    p = tl.exp2((s - used_top[:, None]) * c)
    alpha = tl.exp2((top - used_top) * c)
    return p, new_top, total * alpha + tl.sum(p, 1), acc * alpha[:, None]


@triton.jit
def weights(s, natural, lse):
    """Weights of scores from their rows' lse. It holds the rounded product of a row's highest score if no other counts,
    so this product must be rounded too: launches do not fuse it with the difference."""
    return tl.exp2((s * natural - lse) * 1.4426950408889634)


@triton.jit
def inside_both(kept, d, D: tl.constexpr, DP: tl.constexpr, AXIS: tl.constexpr):
    """Return the mask of a load. ``kept`` runs along the axis that is not the head dim, which may be padded."""
    mask = tl.expand_dims(kept, AXIS)
    if D != DP:
        mask = mask & tl.expand_dims(d < D, 1 - AXIS)
    return mask


@triton.jit
def whole_tile(
    X, x_n, TILES, b, head, n0, n, d,
    D: tl.constexpr, DP: tl.constexpr, SIDE: tl.constexpr, TRANSPOSED: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Load SIDE tokens starting at ``n0``, which all exist, as ``[SIDE, DP]`` or ``[DP, SIDE]``: from the rows of one
    head at ``X``, or by a descriptor of the tensor."""
    if TMA:
        x = tl.reshape(TILES.load([b, head, n0, 0]), [SIDE, DP])
        if TRANSPOSED:
            x = tl.trans(x)
    else:
        tile = X + n0.to(tl.int64) * x_n
        if TRANSPOSED:
            places = n[None, :] * x_n + d[:, None]
        else:
            places = n[:, None] * x_n + d[None, :]
        if D == DP:
            x = tl.load(tile + places)
        else:
            x = tl.load(tile + places, mask=tl.expand_dims(d < D, 1 if TRANSPOSED else 0), other=0.0)
    return x


@triton.jit
def keys_kept(key_bits, key_length, n0, n_keys, HAS_BITS: tl.constexpr, BN: tl.constexpr):
    """Return the keys, of BN starting at ``n0``, that exist and that the call's own key mask keeps."""
    key = n0 + tl.arange(0, BN)
    kept = (key < n_keys) & (key < key_length)
    if HAS_BITS:
        word = n0 // 32 + tl.arange(0, BN // 32)
        words = tl.load(key_bits + word, mask=word * 32 < n_keys, other=0)
        kept = kept & expanded_row(words, BN)
    return kept


@triton.jit
def _four(w0, w1, w2, w3):
    """Join four words in two new last dimensions, whose flat number is the word's."""
    return tl.join(tl.join(w0, w2), tl.join(w1, w3))


@triton.jit
def _philox(call, query, head, batch, seed):
    low = (seed & 0xFFFFFFFF).to(tl.uint32)
    high = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    call, query = tl.broadcast(call, query)
    c2 = tl.full(call.shape, 0, tl.uint32) + head.to(tl.uint32)
    c3 = tl.full(call.shape, 0, tl.uint32) + batch.to(tl.uint32)
    return philox_impl(call, query, c2, c3, low, high, 7)


@triton.jit
def survives(seed, batch, head, query, n0, threshold, BM: tl.constexpr, BN: tl.constexpr):
    """Return the pairs that dropout keeps, ``[BM, BN]``. A Philox call is for 8 of 32 neighboring keys (`philox`)."""
    call = (n0 // 32 * 4 + tl.arange(0, BN // 8)).to(tl.uint32)[None, :]
    w0, w1, w2, w3 = _philox(call, query.to(tl.uint32)[:, None], head, batch, seed)
    words = tl.permute(tl.reshape(_four(w0, w1, w2, w3), [BM, BN // 32, 4, 4]), (0, 1, 3, 2))
    return tl.reshape(tl.join(words & 0xFFFF, words >> 16), [BM, BN]) >= threshold


@triton.jit
def survives_transposed(seed, batch, head, query, n0, threshold, BM: tl.constexpr, BN: tl.constexpr):
    """Return `survives` as ``[BN, BM]``."""
    call = (n0 // 32 * 4 + tl.arange(0, BN // 8)).to(tl.uint32)[:, None]
    w0, w1, w2, w3 = _philox(call, query.to(tl.uint32)[None, :], head, batch, seed)
    words = tl.reshape(_four(w0, w1, w2, w3), [BN // 32, 4, BM, 4])
    words = tl.permute(words, (0, 3, 1, 2))
    halves = tl.permute(tl.join(words & 0xFFFF, words >> 16), (0, 1, 2, 4, 3))
    return tl.reshape(halves, [BN, BM]) >= threshold


@triton.jit
def number_of(x, at, PLACED: tl.constexpr):
    """Return the number in the whole problem of a head or batch element of the call."""
    if PLACED:
        x = tl.load(at + x)
    return x


@triton.jit
def position_of(token, tile, number, at, BLOCK: tl.constexpr, PLACED: tl.constexpr):
    """Return the position in the whole problem of a token at ``token``, in tile ``number``, the call's ``tile``-th."""
    if PLACED:
        token += (tl.load(at + tile) - number) * BLOCK
    return token


@triton.jit
def stretch(full_ptr, part_ptr, slot, split_first, split_last):
    """Return the begin and end of a split among the full tiles of its list, then among the partial tiles."""
    full_first = tl.load(full_ptr + slot)
    n_full = tl.load(full_ptr + slot + 1) - full_first
    part_first = tl.load(part_ptr + slot)
    return (
        full_first + tl.minimum(split_first, n_full),
        full_first + tl.minimum(split_last, n_full),
        part_first + tl.maximum(split_first - n_full, 0),
        part_first + tl.maximum(split_last - n_full, 0),
    )


@triton.jit
def rows_of(row, first_row, start, n_queries, sub, BLOCK: tl.constexpr, BM: tl.constexpr, PACK: tl.constexpr):
    """Return the query of each row of a sub-tile, its row in the bits, its packed head, and if it exists."""
    tile = (first_row + row) * BLOCK
    inside = tl.maximum(start - tile, 0) + sub * (BM // PACK) + tl.arange(0, BM) // PACK
    query = tile + inside - start
    return query, inside, tl.arange(0, BM) % PACK, (query < n_queries) & (inside < BLOCK)


@triton.jit
def without_bits(full_col, full, full_end, n_keys, BLOCK: tl.constexpr, MASKED: tl.constexpr, RAGGED: tl.constexpr):
    """Count a row's full tiles that need a mask: all under a key mask, otherwise the last if its column is ragged."""
    count = 0
    if MASKED:
        count = full_end - full
    elif RAGGED:
        last = tl.load(full_col + full_end - 1, mask=full_end > full, other=-1)
        count = ((last + 1) * BLOCK > n_keys).to(tl.int32)
    return count


@triton.jit
def listed(tiles, step, steps, PER: tl.constexpr):
    """Return the entry of a list of full tiles that a step is in: each has PER steps."""
    return tl.load(tiles + step // PER, mask=step < steps, other=0)


@triton.jit
def number_at(part_tile, part, n_full, step, steps, PER: tl.constexpr, MIXED: tl.constexpr):
    """Return the number of the tile of a step of a masked loop."""
    there = step < steps
    if MIXED:
        there = there & (step // PER >= n_full)
    return tl.load(part_tile + part + step // PER - n_full, mask=there, other=0)


@triton.jit
def next_tile(
    full_list, full_end, n_full, part_list, part, part_tile, any_words, number, step, steps,
    BLOCK: tl.constexpr, SIDE: tl.constexpr, MIXED: tl.constexpr,
):  # fmt: skip
    """Return the tile of a step of a masked loop: its place, its number, and which of its SIDE columns anybody keeps,
    as two scalars of up to 64 bits; then the number of the tile of the step after it.

    The last ``n_full`` full tiles come first, if MIXED says that there are any; then the partial ones. ``number`` is
    that of the step's tile, as this function returned it a step ago. We call it a step before the tile, so that what
    it loads stays in registers. A copy whose address were itself copied would keep all other copies waiting.
    """
    PER: tl.constexpr = BLOCK // SIDE
    entry = step // PER
    there = step < steps
    place_there = there
    places = part_list + part + entry - n_full
    if MIXED:
        places = tl.where(entry >= n_full, places, full_list + full_end - n_full + entry)
        there = there & (entry >= n_full)
    first = any_words + number.to(tl.int64) * (BLOCK // 32) + step % PER * (SIDE // 32)
    if SIDE == 32:
        low = tl.load(first, mask=there, other=-1)
        high = low
    else:
        pairs = first.to(tl.pointer_type(tl.int64))
        low = tl.load(pairs, mask=there, other=-1)
        high = low
        if SIDE == 128:
            high = tl.load(pairs + 1, mask=there, other=-1)
    place = tl.load(places, mask=place_there, other=0)
    # The pipeliner copies a value ahead that both chooses a mask and finds words, so we load the number twice.
    now = number_at(part_tile, part, n_full, step, steps, PER, MIXED)
    return place, now, low, high, number_at(part_tile, part, n_full, step + 1, steps, PER, MIXED)


@triton.jit
def any_kept(low, high, SIDE: tl.constexpr):
    """Return the columns, ``[SIDE]``, that `next_tile` says anybody keeps."""
    n = tl.arange(0, SIDE)
    word = low.to(tl.int32)
    if SIDE >= 64:
        word = tl.where(n % 64 < 32, word, (low >> 32).to(tl.int32))
    if SIDE == 128:
        word = tl.where(n < 64, word, tl.where(n < 96, high.to(tl.int32), (high >> 32).to(tl.int32)))
    return ((word >> (n & 15)) & (1 << (n & 16))) != 0


@triton.jit
def words_of(
    bits, number, step, n_full, inside,
    BLOCK: tl.constexpr, SIDE: tl.constexpr, MIXED: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """Return the words of a tile for a step of a masked loop. A full tile has all bits set. RAGGED: ``inside``, the
    rows of the words, may lead beyond the tile."""
    W: tl.constexpr = BLOCK // 32
    PER: tl.constexpr = BLOCK // SIDE
    word = step % PER * (SIDE // 32) + tl.arange(0, SIDE // 32)
    places = bits + (number.to(tl.int64) * BLOCK + inside)[:, None] * W + word[None, :]
    if MIXED:
        has_bits = step // PER >= n_full
        if RAGGED:
            words = tl.load(places, mask=(inside < BLOCK)[:, None] & has_bits, other=-1)
        else:
            words = tl.load(places, mask=has_bits, other=-1)
    else:
        if RAGGED:
            words = tl.load(places, mask=(inside < BLOCK)[:, None], other=0)
        else:
            words = tl.load(places)
    return words
