"""The forward kernels: one split of a row tile's list, and the merge of the splits.

Suffixes: ``M`` queries of a tile, ``N`` keys of a tile, ``D`` head dim, ``E`` value dim. Scores and their maxima stay
in raw units, because the rounding of a scaled maximum grows with the score. ``c`` is ``natural``, the size of the
scale, times log2(e).
"""

import triton
import triton.language as tl

from ringtile.kernels.triton.tiles import (
    CHANGING,
    any_kept,
    expanded,
    expanded_row,
    inside_both,
    keys_kept,
    listed,
    next_tile,
    number_at,
    number_of,
    online_softmax_step,
    position_of,
    rows_of,
    seen_by,
    stretch,
    survives,
    whole_tile,
    without_bits,
    words_of,
)


@triton.jit(do_not_specialize=CHANGING)
def forward_kernel(
    Q, K, V, K_TILES, V_TILES, OUT, LSE, SCRATCH,
    group, work, begin, full_ptr, full_col, part_ptr, part_col, part_tile, bits, cols_any,
    key_bits, key_lengths, seed, row_at, col_at, head_at, batch_at,
    c, natural, dropout_scale, threshold,
    heads, ratio, n_queries, n_keys, start, first_row, n_rows, longest, scratch_stride, room, key_words,
    group_b, group_h,
    q_b, q_h, q_n, k_b, k_h, k_n: tl.constexpr, v_b, v_h, v_n: tl.constexpr, o_b, o_h, o_n,
    D: tl.constexpr, E: tl.constexpr, DP: tl.constexpr, EP: tl.constexpr,
    BLOCK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SUBS: tl.constexpr, PACK: tl.constexpr,
    SIGN: tl.constexpr, PRECISION: tl.constexpr, FAR: tl.constexpr, RAGGED_ROWS: tl.constexpr,
    RAGGED_KEYS: tl.constexpr, HAS_BITS: tl.constexpr, HAS_LENGTHS: tl.constexpr, DROPOUT: tl.constexpr,
    PLACED: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    sub = program % SUBS
    bh = program // SUBS // longest
    if PACK == 1:
        b = bh // heads
        h = bh % heads
    else:
        b = bh // (heads // ratio)
        h = bh % (heads // ratio) * ratio
    g = tl.load(group + b * group_b + h * group_h)
    item = tl.load(begin + g) + program // SUBS % longest
    if item >= tl.load(begin + g + 1):
        return
    slot = tl.load(work + item * 4)
    full, full_end, part, part_end = stretch(
        full_ptr, part_ptr, slot, tl.load(work + item * 4 + 1), tl.load(work + item * 4 + 2)
    )
    scratch = tl.load(work + item * 4 + 3)
    row = slot - g * n_rows

    query, inside, packed, exists = rows_of(row, first_row, start, n_queries, sub, BLOCK, BM, PACK)
    exists = exists & (packed < ratio)
    head = h + packed
    d, e, n = tl.arange(0, DP), tl.arange(0, EP), tl.arange(0, BN)
    if FAR:
        n = n.to(tl.int64)
    rows = b.to(tl.int64) * q_b + head.to(tl.int64) * q_h + query.to(tl.int64) * q_n
    q = tl.load(Q + rows[:, None] + d[None, :], mask=inside_both(exists, d, D, DP, 1), other=0.0)
    if SIGN != 1:
        q = q * SIGN
    kv_head = (h // ratio).to(tl.int64)
    K += b.to(tl.int64) * k_b + kv_head * k_h
    V += b.to(tl.int64) * v_b + kv_head * v_h
    k_places = n[None, :] * k_n + d[:, None]
    v_places = n[:, None] * v_n + e[None, :]

    top = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, EP], tl.float32)
    if DROPOUT:
        seed_value = tl.load(seed)
        batch_number = number_of(b, batch_at, PLACED)
        head_number = number_of(head, head_at, PLACED)[:, None]
        query_position = position_of(query + start, row, first_row + row, row_at, BLOCK, PLACED)

    # Full tiles whose keys all exist need no mask. If the last column is ragged, it comes later.
    # Whether the slow loop takes full tiles too, without bits.
    MIXED: tl.constexpr = HAS_BITS or HAS_LENGTHS or RAGGED_KEYS
    slow_full = without_bits(full_col, full, full_end, n_keys, BLOCK, HAS_BITS or HAS_LENGTHS, RAGGED_KEYS)
    PER: tl.constexpr = BLOCK // BN
    steps = (full_end - slow_full - full) * PER
    n0 = listed(full_col + full, 0, steps, PER) * BLOCK
    later = listed(full_col + full, 1, steps, PER)
    for i in tl.range(0, steps, num_stages=STAGES):
        col = n0 // BLOCK
        k = whole_tile(K, k_n, K_TILES, b, h // ratio, n0, n, d, D, DP, BN, True, TMA)
        v = whole_tile(V, v_n, V_TILES, b, h // ratio, n0, n, e, E, EP, BN, False, TMA)
        s = tl.dot(q, k, input_precision=PRECISION)
        p, top, total, acc = online_softmax_step(s, c, top, total, acc, False)
        if DROPOUT:
            at0 = position_of(n0, col, col, col_at, BLOCK, PLACED)
            stays = survives(seed_value, batch_number, head_number, query_position, at0, threshold, BM, BN)
            p = tl.where(stays, p, 0.0)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
        # The tile after the next is in registers already, so that copies wait for no list.
        n0 = later * BLOCK + (i + 1) % PER * BN
        later = listed(full_col + full, i + 2, steps, PER)

    key_length = n_keys
    if HAS_LENGTHS:
        key_length = tl.minimum(tl.load(key_lengths + b), n_keys).to(tl.int32)
    steps = (slow_full + part_end - part) * PER
    later = number_at(part_tile, part, slow_full, 0, steps, PER, MIXED)
    col, number, low, high, later = next_tile(
        full_col, full_end, slow_full, part_col, part, part_tile, cols_any, later, 0, steps, BLOCK, BN, MIXED
    )
    for i in tl.range(0, steps, num_stages=STAGES):
        words = words_of(bits, number, i, slow_full, inside, BLOCK, BN, MIXED, True)
        n0 = col * BLOCK + i % PER * BN
        # Zero times NaN is NaN, so we do not read values that no row keeps.
        kept = any_kept(low, high, BN)
        if RAGGED_ROWS:
            kept = kept & expanded_row(seen_by(words, exists), BN)
        stay = expanded(words, BM, BN, True)
        if MIXED:
            kept = kept & keys_kept(key_bits + b.to(tl.int64) * key_words, key_length, n0, n_keys, HAS_BITS, BN)
            stay = stay & kept[None, :]
        k_tile = K + n0.to(tl.int64) * k_n
        v_tile = V + n0.to(tl.int64) * v_n
        k = tl.load(k_tile + k_places, mask=inside_both(kept, d, D, DP, 0), other=0.0)
        v = tl.load(v_tile + v_places, mask=inside_both(kept, e, E, EP, 1), other=0.0)
        s = tl.dot(q, k, input_precision=PRECISION)
        s = tl.where(stay, s, float("-inf"))
        p, top, total, acc = online_softmax_step(s, c, top, total, acc, True)
        if DROPOUT:
            at0 = position_of(n0, col, col, col_at, BLOCK, PLACED)
            stays = survives(seed_value, batch_number, head_number, query_position, at0, threshold, BM, BN)
            p = tl.where(stays, p, 0.0)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
        col, number, low, high, later = next_tile(
            full_col, full_end, slow_full, part_col, part, part_tile, cols_any, later, i + 1, steps, BLOCK, BN, MIXED
        )

    empty = total == 0.0
    acc = acc / tl.where(empty, 1.0, total)[:, None]
    if DROPOUT:
        acc = acc * dropout_scale
    lse = tl.where(empty, float("-inf"), tl.where(empty, 0.0, top) * natural + tl.log(tl.where(empty, 1.0, total)))
    if SPLIT:
        if scratch >= 0:
            place = (bh.to(tl.int64) * scratch_stride + scratch) * room + sub * BM + tl.arange(0, BM)
            tl.store(SCRATCH + place[:, None] * (EP + 1) + e[None, :], acc)
            tl.store(SCRATCH + place * (EP + 1) + EP, lse)
            return
    places = b.to(tl.int64) * o_b + head.to(tl.int64) * o_h + query.to(tl.int64) * o_n
    tl.store(OUT + places[:, None] + e[None, :], acc.to(OUT.dtype.element_ty), mask=inside_both(exists, e, E, EP, 1))
    tl.store(LSE + (b * heads + head).to(tl.int64) * n_queries + query, lse, mask=exists)


@triton.jit(do_not_specialize=CHANGING)
def merge_kernel(
    SCRATCH, OUT, LSE, group, splits,
    heads, ratio, n_queries, start, first_row, n_rows, scratch_stride, room, group_b, group_h, o_b, o_h, o_n,
    E: tl.constexpr, EP: tl.constexpr, BLOCK: tl.constexpr, BM: tl.constexpr, SUBS: tl.constexpr, PACK: tl.constexpr,
):  # fmt: skip
    """Merge a row's splits in the order of its list."""
    program = tl.program_id(0)
    sub = program % SUBS
    bh = program // SUBS // n_rows
    if PACK == 1:
        b = bh // heads
        h = bh % heads
    else:
        b = bh // (heads // ratio)
        h = bh % (heads // ratio) * ratio
    row = program // SUBS % n_rows
    slot = tl.load(group + b * group_b + h * group_h) * n_rows + row
    count = tl.load(splits + slot * 2 + 1)
    if count == 0:
        return
    query, _, packed, exists = rows_of(row, first_row, start, n_queries, sub, BLOCK, BM, PACK)
    exists = exists & (packed < ratio)
    head = h + packed
    e = tl.arange(0, EP)
    first = bh.to(tl.int64) * scratch_stride + tl.load(splits + slot * 2)
    top = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, EP], tl.float32)
    for split in range(count):
        place = (first + split) * room + sub * BM + tl.arange(0, BM)
        out = tl.load(SCRATCH + place[:, None] * (EP + 1) + e[None, :])
        lse = tl.load(SCRATCH + place * (EP + 1) + EP)
        new_top = tl.maximum(top, lse)
        used_top = tl.where(new_top == float("-inf"), 0.0, new_top)
        alpha, weight = tl.exp(top - used_top), tl.exp(lse - used_top)
        total = total * alpha + weight
        acc = acc * alpha[:, None] + out * weight[:, None]
        top = new_top
    empty = total == 0.0
    acc = acc / tl.where(empty, 1.0, total)[:, None]
    lse = tl.where(empty, float("-inf"), tl.where(empty, 0.0, top) + tl.log(tl.where(empty, 1.0, total)))
    places = b.to(tl.int64) * o_b + head.to(tl.int64) * o_h + query.to(tl.int64) * o_n
    tl.store(OUT + places[:, None] + e[None, :], acc.to(OUT.dtype.element_ty), mask=inside_both(exists, e, E, EP, 1))
    tl.store(LSE + (b * heads + head).to(tl.int64) * n_queries + query, lse, mask=exists)
