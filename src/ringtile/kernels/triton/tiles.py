"""Parts of the kernels that handle one tile: its mask, its dropout, its position in a list.

In Triton's language, shapes are those of tiles in registers, and ``tl.constexpr`` arguments are compiled in.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.random import philox_impl

CHANGING = (
    *("threshold", "heads", "ratio", "n_queries", "n_keys", "start", "first_row", "n_rows", "n_cols", "longest"),
    *("scratch_stride", "whole_base", "room", "key_words", "size", "group_b", "group_h"),
)
"""Values that do not cause a new compilation: each of them would make two or three variants of every kernel. Only dK/dV
specializes on those that tell how statistics are aligned: unaligned reads would cost a fifth more instructions.

They are no tuple: Triton 3.6 specializes on each integer of a tuple, whatever ``do_not_specialize`` says."""


LOWEST = tl.constexpr(-3.4028234663852886e38)
"""The lowest finite float32: less this, a score of -inf is -inf, and its weight is 0."""


class Lists(NamedTuple):
    """The lists of one side, rows or columns, as a kernel reads them. ``full``, ``part``: tiles of the other side."""

    group: Any
    """Group of each batch element and head."""
    work: Any
    """A row per split: its list, its first and last entry, and its scratch slot or -1."""
    begin: Any
    """First split of each group."""
    full_ptr: Any
    full: Any
    part_ptr: Any
    part: Any
    part_tile: Any
    bits: Any
    any_kept: Any
    """Which rows or columns of a tile anybody keeps, as words."""


class Numbers(NamedTuple):
    """Numbers in the whole problem, for dropout. Without `Constants.PLACED`, they are tensors that nothing reads."""

    row_at: Any
    """Of each row tile."""
    col_at: Any
    head_at: Any
    batch_at: Any


class Stride(NamedTuple):
    """Elements from one batch element, head and token to the next."""

    b: int
    h: int
    n: Any


class Strides(NamedTuple):
    """Strides of the tensors that a kernel reads: ``o`` is the output, ``g`` its gradient."""

    q: Any = None
    k: Any = None
    v: Any = None
    o: Any = None
    g: Any = None


class Constants(NamedTuple):
    """What is compiled in. Kernels that merge splits leave most of it at its default, so they are compiled less often.

    D and E are the head dims of keys and values, DP and EP these padded to powers of two. A program computes a sub-tile
    of BM queries and BN keys, one of SUBS in a tile of BLOCK tokens.
    """

    D: int = 0
    E: int = 0
    DP: int = 0
    EP: int = 0
    BLOCK: int = 0
    BM: int = 0
    BN: int = 0
    SUBS: int = 1
    PACK: int = 1
    """Query heads of a key head that share a tile, padded to a power of two."""
    LOOPED: int = 1
    """Query heads of a key head that one program of dK and dV sums."""
    SIGN: int = 1
    """Sign of the scale: keys or queries are multiplied by it, so the kernels see a scale > 0."""
    PRECISION: str = "ieee"
    FAR: bool = False
    """Offsets within a tile need 64 bits."""
    RAGGED_ROWS: bool = False
    RAGGED_KEYS: bool = False
    HAS_BITS: bool = False
    HAS_LENGTHS: bool = False
    DROPOUT: bool = False
    PLACED: bool = False
    """Dropout counts tiles, heads and batch elements as `Numbers` says, not from 0."""
    SPLIT: bool = False
    """Some lists are cut, so sums go to scratch."""
    STAGES: int = 1
    TMA: bool = False


@triton.jit
def expanded(words, ROWS: tl.constexpr, COLS: tl.constexpr, BY_SIGN: tl.constexpr):
    """Return ``[ROWS, COLS // 32]`` words as bits ``[ROWS, COLS]``.

    A thread of the matrix units has columns 2 t, 2 t + 1, 2 t + 8 and so on: it shifts a word once, by 2 t, and then
    tests constant bits. BY_SIGN: for bits that a maximum follows. LLVM would pack constant bits into vectors there.
    """
    bit = tl.arange(0, 32)
    # Bit 21 is 4 + 17 (masks 6 and 25): a shift by 4, then a test of bit 17, or a shift that makes it the sign bit.
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
def online_softmax_step(s, c, top, total, acc):
    """Weights of scores, with maxima, sums and outputs brought up to date. The first maxima are `LOWEST`."""
    new_top = tl.maximum(top, tl.max(s, 1))
    # Scaled after the difference: near the maximum the difference is exact, but a scaled maximum is rounded.
    p = tl.exp2((s - new_top[:, None]) * c)
    alpha = tl.exp2((top - new_top) * c)
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
    X, x_n, TILES, b, head, n0, n, d, D: tl.constexpr, DP: tl.constexpr, C: tl.constexpr, TRANSPOSED: tl.constexpr
):
    """Load BN tokens starting at ``n0``, which all exist, as ``[BN, DP]`` or ``[DP, BN]``: from the rows of one
    head at ``X``, or by a descriptor of the tensor."""
    if C.TMA:
        x = tl.reshape(TILES.load([b, head, n0, 0]), C.BN, DP)
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
def keys_kept(key_bits, b, key_words, key_length, n0, n_keys, C: tl.constexpr):
    """Return the keys, of BN starting at ``n0``, that exist and that the call's own key mask keeps."""
    key = n0 + tl.arange(0, C.BN)
    kept = (key < n_keys) & (key < key_length)
    if C.HAS_BITS:
        word = n0 // 32 + tl.arange(0, C.BN // 32)
        words = tl.load(key_bits + b.to(tl.int64) * key_words + word, mask=word * 32 < n_keys, other=0)
        kept = kept & expanded_row(words, C.BN)
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
    # From [window, call, word] to [window, word, call]: key 13 reads word 13 // 8 = 1 of call 13 // 2 % 4 = 2.
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
def number_of(x, at, C: tl.constexpr):
    """Return the number in the whole problem of a head or batch element of the call."""
    if C.PLACED:
        x = tl.load(at + x)
    return x


@triton.jit
def position_of(token, tile, number, at, C: tl.constexpr):
    """Return the position in the whole problem of a token at ``token``, in tile ``number``, the call's ``tile``-th.

    A rank that holds tile 6 of the whole as its tile 2, in blocks of 64: its token 130 has position 130 + (6 - 2) * 64.
    """
    if C.PLACED:
        token += (tl.load(at + tile) - number) * C.BLOCK
    return token


@triton.jit
def survivors(x, draw, n0, col, at, threshold, C: tl.constexpr):
    """Return ``x`` ``[BM, BN]`` with 0 in the pairs that dropout drops. ``draw``: seed, batch, head, queries."""
    if C.DROPOUT:
        seed, batch, head, query = draw
        key = position_of(n0, col, col, at.col_at, C)
        x = tl.where(survives(seed, batch, head, query, key, threshold, C.BM, C.BN), x, 0.0)
    return x


@triton.jit
def split_of(lists, item):
    """Return the list of a split, its begin and end among the full tiles and among the partial ones, and its scratch.

    A list has its full tiles first. In one of 5 full and 4 partial tiles, the split [3, 7) has full tiles [3, 5) and
    partial tiles [0, 2).
    """
    slot = tl.load(lists.work + item * 4)
    first, last = tl.load(lists.work + item * 4 + 1), tl.load(lists.work + item * 4 + 2)
    full_first = tl.load(lists.full_ptr + slot)
    n_full = tl.load(lists.full_ptr + slot + 1) - full_first
    part_first = tl.load(lists.part_ptr + slot)
    full, full_end = full_first + tl.minimum(first, n_full), full_first + tl.minimum(last, n_full)
    part, part_end = part_first + tl.maximum(first - n_full, 0), part_first + tl.maximum(last - n_full, 0)
    return slot, full, full_end, part, part_end, tl.load(lists.work + item * 4 + 3)


@triton.jit
def heads_of(bh, heads, ratio, PACK: tl.constexpr):
    """Return the batch element and head of a program, or the first head of those that are packed."""
    if PACK == 1:
        b = bh // heads
        h = bh % heads
    else:
        # Of 8 heads with 2 to a key head (ratio 2), program 5 has batch element 5 // 4 = 1 and head 5 % 4 * 2 = 2.
        b = bh // (heads // ratio)
        h = bh % (heads // ratio) * ratio
    return b, h


@triton.jit
def place_of(stride, b, h):
    """Return the offset of a head."""
    return b.to(tl.int64) * stride.b + h.to(tl.int64) * stride.h


@triton.jit
def rows_of(row, first_row, start, n_queries, sub, C: tl.constexpr):
    """Return the query of each row of a sub-tile, its row in the bits, its packed head, and if it exists.

    With a start of 100 and blocks of 64, the first row tile is number 1, positions 64 to 127. Its first query has
    position 100, so it is row 36 of the tile's bits, and the tile has 28 queries.
    """
    tile = (first_row + row) * C.BLOCK
    inside = tl.maximum(start - tile, 0) + sub * (C.BM // C.PACK) + tl.arange(0, C.BM) // C.PACK
    query = tile + inside - start
    return query, inside, tl.arange(0, C.BM) % C.PACK, (query < n_queries) & (inside < C.BLOCK)


@triton.jit
def without_bits(lists, full, full_end, n_keys, C: tl.constexpr):
    """Count a row's full tiles that need a mask: all under a key mask, otherwise the last if its column is ragged."""
    count = 0
    if C.HAS_BITS or C.HAS_LENGTHS:
        count = full_end - full
    elif C.RAGGED_KEYS:
        last = tl.load(lists.full + full_end - 1, mask=full_end > full, other=-1)
        count = ((last + 1) * C.BLOCK > n_keys).to(tl.int32)
    return count


@triton.jit
def listed(tiles, step, steps, PER: tl.constexpr):
    """Return the entry of a list of full tiles that a step is in: each has PER steps."""
    return tl.load(tiles + step // PER, mask=step < steps, other=0)


@triton.jit
def number_at(lists, part, n_full, step, steps, PER: tl.constexpr, MIXED: tl.constexpr):
    """Return the number of the tile of a step of a masked loop."""
    there = step < steps
    if MIXED:
        there = there & (step // PER >= n_full)
    return tl.load(lists.part_tile + part + step // PER - n_full, mask=there, other=0)


@triton.jit
def next_tile(
    lists, full_end, n_full, part, number, step, steps, BLOCK: tl.constexpr, SIDE: tl.constexpr, MIXED: tl.constexpr
):
    """Return the tile of a step of a masked loop: its place, its number, and which of its SIDE columns anybody keeps,
    as two scalars of up to 64 bits; then the number of the tile of the step after it.

    The last ``n_full`` full tiles come first, if MIXED says that there are any; then the partial ones. ``number`` is
    that of the step's tile, as this function returned it a step ago. We call it a step before the tile, so that what
    it loads stays in registers. A copy whose address were itself copied would keep all other copies waiting.
    """
    # Blocks of 128 in sub-tiles of 64 have 2 steps a tile: step 5 is in entry 2 and reads words 2 and 3 of its 4.
    PER: tl.constexpr = BLOCK // SIDE
    entry = step // PER
    there = step < steps
    place_there = there
    places = lists.part + part + entry - n_full
    if MIXED:
        places = tl.where(entry >= n_full, places, lists.full + full_end - n_full + entry)
        there = there & (entry >= n_full)
    first = lists.any_kept + number.to(tl.int64) * (BLOCK // 32) + step % PER * (SIDE // 32)
    # Full tiles, and steps behind the end, keep everything: all bits are set.
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
    now = number_at(lists, part, n_full, step, steps, PER, MIXED)
    return place, now, low, high, number_at(lists, part, n_full, step + 1, steps, PER, MIXED)


@triton.jit
def any_kept(low, high, SIDE: tl.constexpr):
    """Return the columns, ``[SIDE]``, that `next_tile` says anybody keeps."""
    n = tl.arange(0, SIDE)
    word = low.to(tl.int32)
    if SIDE >= 64:
        word = tl.where(n % 64 < 32, word, (low >> 32).to(tl.int32))
    if SIDE == 128:
        word = tl.where(n < 64, word, tl.where(n < 96, high.to(tl.int32), (high >> 32).to(tl.int32)))
    # Column 21 is bit 21 of its word: a shift by 21 & 15 = 5 leaves it in bit 21 & 16.
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
    elif RAGGED:
        words = tl.load(places, mask=(inside < BLOCK)[:, None], other=0)
    else:
        words = tl.load(places)
    return words
