"""The forward kernels: one split of a row tile's list, and the merge of the splits.

Suffixes: ``M`` queries of a tile, ``N`` keys of a tile, ``D`` head dim, ``E`` value dim. Scores and their maxima stay
in raw units, because the rounding of a scaled maximum grows with the score. ``c`` is ``natural``, the size of the
scale, times log2(e).
"""

import triton
import triton.language as tl

from ringtile.kernels.triton import tiles


@triton.jit
def _attend(q, k, v, stay, top, total, acc, c, draw, n0, col, at, threshold, C: tl.constexpr, MASKED: tl.constexpr):
    """Return maxima, sums and outputs with one more tile of keys. MASKED: ``stay`` contains the kept pairs."""
    s = tl.dot(q, k, input_precision=C.PRECISION)
    if MASKED:
        s = tl.where(stay, s, float("-inf"))
    p, top, total, acc = tiles.online_softmax_step(s, c, top, total, acc)
    # The sum of the weights is that before dropout: the softmax does not know of it.
    p = tiles.survivors(p, draw, n0, col, at, threshold, C)
    return top, total, tl.dot(p.to(v.dtype), v, acc, input_precision=C.PRECISION)


@triton.jit
def _write(OUT, LSE, acc, lse, b, head, query, exists, heads, n_queries, stride, C: tl.constexpr):
    e = tl.arange(0, C.EP)
    places = tiles.place_of(stride, b, head) + query.to(tl.int64) * stride.n
    mask = tiles.inside_both(exists, e, C.E, C.EP, 1)
    tl.store(OUT + places[:, None] + e[None, :], acc.to(OUT.dtype.element_ty), mask=mask)
    tl.store(LSE + (b * heads + head).to(tl.int64) * n_queries + query, lse, mask=exists)


@triton.jit(do_not_specialize=tiles.CHANGING)
def forward_kernel(
    Q, K, V, K_TILES, V_TILES, OUT, LSE, SCRATCH, lists, key_bits, key_lengths, seed, at,
    c, natural, dropout_scale, threshold,
    heads, ratio, n_queries, n_keys, start, first_row, n_rows, longest, scratch_stride, room, key_words,
    group_b, group_h, strides, C: tl.constexpr,
):  # fmt: skip
    # Programs of one tile, and splits of one head, are neighbors: with SUBS = 2 and longest = 5, program 37 computes
    # sub-tile 37 % 2 = 1 of split 37 // 2 % 5 = 3 of head 37 // 10 = 3.
    program = tl.program_id(0)
    sub = program % C.SUBS
    bh = program // C.SUBS // longest
    b, h = tiles.heads_of(bh, heads, ratio, C.PACK)
    g = tl.load(lists.group + b * group_b + h * group_h)
    item = tl.load(lists.begin + g) + program // C.SUBS % longest
    # Groups with fewer splits than the longest leave programs without work.
    if item >= tl.load(lists.begin + g + 1):
        return
    slot, full, full_end, part, part_end, scratch = tiles.split_of(lists, item)
    row = slot - g * n_rows

    query, inside, packed, exists = tiles.rows_of(row, first_row, start, n_queries, sub, C)
    exists = exists & (packed < ratio)
    head = h + packed
    d, e, n = tl.arange(0, C.DP), tl.arange(0, C.EP), tl.arange(0, C.BN)
    if C.FAR:
        n = n.to(tl.int64)
    rows = tiles.place_of(strides.q, b, head) + query.to(tl.int64) * strides.q.n
    q = tl.load(Q + rows[:, None] + d[None, :], mask=tiles.inside_both(exists, d, C.D, C.DP, 1), other=0.0)
    if C.SIGN != 1:
        q = q * C.SIGN
    kv_head = (h // ratio).to(tl.int64)
    K += tiles.place_of(strides.k, b, kv_head)
    V += tiles.place_of(strides.v, b, kv_head)
    k_places = n[None, :] * strides.k.n + d[:, None]
    v_places = n[:, None] * strides.v.n + e[None, :]

    BM: tl.constexpr = C.BM
    EP: tl.constexpr = C.EP
    top = tl.full([BM], tiles.LOWEST, tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, EP], tl.float32)
    draw = None
    if C.DROPOUT:
        seed_value, batch_number = tl.load(seed), tiles.number_of(b, at.batch_at, C)
        head_number = tiles.number_of(head, at.head_at, C)[:, None]
        query_at = tiles.position_of(query + start, row, first_row + row, at.row_at, C)
        draw = seed_value, batch_number, head_number, query_at

    # Full tiles whose keys all exist need no mask. If the last column is ragged, it comes later.
    # MIXED: the masked loop also runs full tiles, because key masks, lengths or the ragged last column cut them.
    MIXED: tl.constexpr = C.HAS_BITS or C.HAS_LENGTHS or C.RAGGED_KEYS
    slow_full = tiles.without_bits(lists, full, full_end, n_keys, C)
    PER: tl.constexpr = C.BLOCK // C.BN
    steps = (full_end - slow_full - full) * PER
    n0 = tiles.listed(lists.full + full, 0, steps, PER) * C.BLOCK
    later = tiles.listed(lists.full + full, 1, steps, PER)
    for i in tl.range(0, steps, num_stages=C.STAGES):
        col = n0 // C.BLOCK
        k = tiles.whole_tile(K, strides.k.n, K_TILES, b, h // ratio, n0, n, d, C.D, C.DP, C, True)
        v = tiles.whole_tile(V, strides.v.n, V_TILES, b, h // ratio, n0, n, e, C.E, C.EP, C, False)
        top, total, acc = _attend(q, k, v, None, top, total, acc, c, draw, n0, col, at, threshold, C, False)
        # The tile after the next is in registers already, so that copies wait for no list.
        n0 = later * C.BLOCK + (i + 1) % PER * C.BN
        later = tiles.listed(lists.full + full, i + 2, steps, PER)

    key_length = n_keys
    if C.HAS_LENGTHS:
        key_length = tl.minimum(tl.load(key_lengths + b), n_keys).to(tl.int32)
    steps = (slow_full + part_end - part) * PER
    later = tiles.number_at(lists, part, slow_full, 0, steps, PER, MIXED)
    col, number, low, high, later = tiles.next_tile(
        lists, full_end, slow_full, part, later, 0, steps, C.BLOCK, C.BN, MIXED
    )
    for i in tl.range(0, steps, num_stages=C.STAGES):
        words = tiles.words_of(lists.bits, number, i, slow_full, inside, C.BLOCK, C.BN, MIXED, True)
        n0 = col * C.BLOCK + i % PER * C.BN
        # Zero times NaN is NaN, so we do not read values that no row keeps.
        kept = tiles.any_kept(low, high, C.BN)
        if C.RAGGED_ROWS:
            kept = kept & tiles.expanded_row(tiles.seen_by(words, exists), C.BN)
        stay = tiles.expanded(words, C.BM, C.BN, True)
        if MIXED:
            kept = kept & tiles.keys_kept(key_bits, b, key_words, key_length, n0, n_keys, C)
            stay = stay & kept[None, :]
        k_tile = K + n0.to(tl.int64) * strides.k.n
        v_tile = V + n0.to(tl.int64) * strides.v.n
        k = tl.load(k_tile + k_places, mask=tiles.inside_both(kept, d, C.D, C.DP, 0), other=0.0)
        v = tl.load(v_tile + v_places, mask=tiles.inside_both(kept, e, C.E, C.EP, 1), other=0.0)
        top, total, acc = _attend(q, k, v, stay, top, total, acc, c, draw, n0, col, at, threshold, C, True)
        col, number, low, high, later = tiles.next_tile(
            lists, full_end, slow_full, part, later, i + 1, steps, C.BLOCK, C.BN, MIXED
        )

    empty = total == 0.0
    acc = tl.where(empty[:, None], 0.0, acc / tl.where(empty, 1.0, total)[:, None])
    if C.DROPOUT:
        acc = acc * dropout_scale
    lse = tl.where(empty, float("-inf"), tl.where(empty, 0.0, top) * natural + tl.log(tl.where(empty, 1.0, total)))
    if C.SPLIT:
        if scratch >= 0:
            # A slot has the output and the lse of each row, side by side: EP + 1 numbers.
            place = (bh.to(tl.int64) * scratch_stride + scratch) * room + sub * C.BM + tl.arange(0, C.BM)
            tl.store(SCRATCH + place[:, None] * (C.EP + 1) + e[None, :], acc)
            tl.store(SCRATCH + place * (C.EP + 1) + C.EP, lse)
            return
    _write(OUT, LSE, acc, lse, b, head, query, exists, heads, n_queries, strides.o, C)


@triton.jit(do_not_specialize=tiles.CHANGING)
def merge_kernel(
    SCRATCH, OUT, LSE, group, splits,
    heads, ratio, n_queries, start, first_row, n_rows, scratch_stride, room, group_b, group_h,
    strides, C: tl.constexpr,
):  # fmt: skip
    """Merge a row's splits in the order of its list."""
    program = tl.program_id(0)
    sub = program % C.SUBS
    bh = program // C.SUBS // n_rows
    b, h = tiles.heads_of(bh, heads, ratio, C.PACK)
    row = program // C.SUBS % n_rows
    slot = tl.load(group + b * group_b + h * group_h) * n_rows + row
    count = tl.load(splits + slot * 2 + 1)
    if count == 0:
        return
    query, _, packed, exists = tiles.rows_of(row, first_row, start, n_queries, sub, C)
    exists = exists & (packed < ratio)
    e = tl.arange(0, C.EP)
    first = bh.to(tl.int64) * scratch_stride + tl.load(splits + slot * 2)
    BM: tl.constexpr = C.BM
    EP: tl.constexpr = C.EP
    top = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, EP], tl.float32)
    for split in range(count):
        place = (first + split) * room + sub * C.BM + tl.arange(0, C.BM)
        out = tl.load(SCRATCH + place[:, None] * (C.EP + 1) + e[None, :])
        lse = tl.load(SCRATCH + place * (C.EP + 1) + C.EP)
        new_top = tl.maximum(top, lse)
        used_top = tl.where(new_top == float("-inf"), 0.0, new_top)
        alpha, weight = tl.exp(top - used_top), tl.exp(lse - used_top)
        total = total * alpha + weight
        acc = acc * alpha[:, None] + out * weight[:, None]
        top = new_top
    empty = total == 0.0
    acc = acc / tl.where(empty, 1.0, total)[:, None]
    lse = tl.where(empty, float("-inf"), tl.where(empty, 0.0, top) + tl.log(tl.where(empty, 1.0, total)))
    _write(OUT, LSE, acc, lse, b, h + packed, query, exists, heads, n_queries, strides.o, C)
