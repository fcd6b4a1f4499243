"""The backward kernels: statistics of the rows, dQ along rows, dK and dV along columns. No addition is atomic.

Suffixes: ``M`` queries of a tile, ``N`` keys of a tile, ``D`` head dim, ``E`` value dim. ``STATS`` is
``[2, B, H, N]`` float32: lse (inf if a row is empty, so that its weights are 0), and the sum over a row of
out times its gradient, less the gradient of lse, over the scale of dropout, which the end results are multiplied by.
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
    position_of,
    rows_of,
    seen_by,
    stretch,
    survives,
    survives_transposed,
    weights,
    whole_tile,
    without_bits,
    words_of,
)


@triton.jit(do_not_specialize=CHANGING)
def stats_kernel(
    OUT, OUT_GRAD, LSE, LSE_GRAD, STATS,
    heads, n_queries, size, dropout_scale, o_b, o_h, o_n, g_b, g_h, g_n,
    E: tl.constexpr, EP: tl.constexpr, BM: tl.constexpr, HAS_LSE_GRAD: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(n_queries, BM)
    program = tl.program_id(0)
    bh = program // blocks
    b = (bh // heads).to(tl.int64)
    h = (bh % heads).to(tl.int64)
    query = program % blocks * BM + tl.arange(0, BM)
    exists = query < n_queries
    e = tl.arange(0, EP)
    mask = exists[:, None] & (e < E)[None, :]
    row = query.to(tl.int64)
    out = tl.load(OUT + (b * o_b + h * o_h + row * o_n)[:, None] + e[None, :], mask=mask, other=0.0)
    grad = tl.load(OUT_GRAD + (b * g_b + h * g_h + row * g_n)[:, None] + e[None, :], mask=mask, other=0.0)
    delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    place = bh.to(tl.int64) * n_queries + query
    lse = tl.load(LSE + place, mask=exists, other=float("-inf"))
    if HAS_LSE_GRAD:
        delta -= tl.load(LSE_GRAD + place, mask=exists, other=0.0)
    empty = lse == float("-inf")
    tl.store(STATS + place, tl.where(empty, float("inf"), lse), mask=exists)
    tl.store(STATS + size + place, tl.where(empty, 0.0, delta) / dropout_scale, mask=exists)


@triton.jit(do_not_specialize=CHANGING)
def dq_kernel(
    Q, K, V, K_TILES, V_TILES, OUT_GRAD, STATS, Q_GRAD, SCRATCH,
    group, work, begin, full_ptr, full_col, part_ptr, part_col, part_tile, bits, cols_any,
    key_bits, key_lengths, seed, row_at, col_at, head_at, batch_at,
    natural, scale, dropout_scale, threshold,
    heads, ratio, n_queries, n_keys, start, first_row, n_rows, longest, scratch_stride, room, key_words, size,
    group_b, group_h,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, g_b, g_h, g_n,
    D: tl.constexpr, E: tl.constexpr, DP: tl.constexpr, EP: tl.constexpr,
    BLOCK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SUBS: tl.constexpr,
    SIGN: tl.constexpr, PRECISION: tl.constexpr, FAR: tl.constexpr, RAGGED_ROWS: tl.constexpr,
    RAGGED_KEYS: tl.constexpr, HAS_BITS: tl.constexpr, HAS_LENGTHS: tl.constexpr, DROPOUT: tl.constexpr,
    PLACED: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    sub = program % SUBS
    bh = program // SUBS // longest
    b = bh // heads
    h = bh % heads
    g = tl.load(group + b * group_b + h * group_h)
    item = tl.load(begin + g) + program // SUBS % longest
    if item >= tl.load(begin + g + 1):
        return
    slot = tl.load(work + item * 4)
    full, full_end, part, part_end = stretch(
        full_ptr, part_ptr, slot, tl.load(work + item * 4 + 1), tl.load(work + item * 4 + 2)
    )
    scratch = tl.load(work + item * 4 + 3)
    row_tile = slot - g * n_rows
    query, inside, _, exists = rows_of(row_tile, first_row, start, n_queries, sub, BLOCK, BM, 1)

    d, e, n = tl.arange(0, DP), tl.arange(0, EP), tl.arange(0, BN)
    if FAR:
        n = n.to(tl.int64)
    row = query.to(tl.int64)
    q_rows = b.to(tl.int64) * q_b + h.to(tl.int64) * q_h + row * q_n
    q = tl.load(Q + q_rows[:, None] + d[None, :], mask=inside_both(exists, d, D, DP, 1), other=0.0)
    if SIGN != 1:
        q = q * SIGN
    g_rows = b.to(tl.int64) * g_b + h.to(tl.int64) * g_h + row * g_n
    out_grad = tl.load(OUT_GRAD + g_rows[:, None] + e[None, :], mask=inside_both(exists, e, E, EP, 1), other=0.0)
    place = bh.to(tl.int64) * n_queries + query
    lse = tl.load(STATS + place, mask=exists, other=float("inf"))
    delta = tl.load(STATS + size + place, mask=exists, other=0.0)
    kv_head = (h // ratio).to(tl.int64)
    K += b.to(tl.int64) * k_b + kv_head * k_h
    V += b.to(tl.int64) * v_b + kv_head * v_h
    k_places = n[None, :] * k_n + d[:, None]
    v_places = n[None, :] * v_n + e[:, None]
    acc = tl.zeros([BM, DP], tl.float32)
    zero = natural - natural  # LLVM would choose after the conversion to half types, which costs more
    if DROPOUT:
        seed_value = tl.load(seed)
        batch_number = number_of(b, batch_at, PLACED)
        head_number = number_of(h, head_at, PLACED)
        query_position = position_of(query + start, row_tile, first_row + row_tile, row_at, BLOCK, PLACED)

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
        v = whole_tile(V, v_n, V_TILES, b, h // ratio, n0, n, e, E, EP, BN, True, TMA)
        s = tl.dot(q, k, input_precision=PRECISION)
        p = weights(s, natural, lse[:, None])
        dp = tl.dot(out_grad, v, input_precision=PRECISION)
        if DROPOUT:
            at0 = position_of(n0, col, col, col_at, BLOCK, PLACED)
            stays = survives(seed_value, batch_number, head_number, query_position, at0, threshold, BM, BN)
            dp = tl.where(stays, dp, 0.0)
        ds = p * (dp - delta[:, None])
        acc = tl.dot(ds.to(k.dtype), tl.trans(k), acc, input_precision=PRECISION)
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
        kept = any_kept(low, high, BN)
        if RAGGED_ROWS:
            kept = kept & expanded_row(seen_by(words, exists), BN)
        stay = expanded(words, BM, BN, False)
        if MIXED:
            kept = kept & keys_kept(key_bits + b.to(tl.int64) * key_words, key_length, n0, n_keys, HAS_BITS, BN)
            stay = stay & kept[None, :]
        k = tl.load(K + n0.to(tl.int64) * k_n + k_places, mask=inside_both(kept, d, D, DP, 0), other=0.0)
        v = tl.load(V + n0.to(tl.int64) * v_n + v_places, mask=inside_both(kept, e, E, EP, 0), other=0.0)
        s = tl.dot(q, k, input_precision=PRECISION)
        p = weights(s, natural, lse[:, None])
        dp = tl.dot(out_grad, v, input_precision=PRECISION)
        if DROPOUT:
            at0 = position_of(n0, col, col, col_at, BLOCK, PLACED)
            stays = survives(seed_value, batch_number, head_number, query_position, at0, threshold, BM, BN)
            dp = tl.where(stays, dp, 0.0)
        ds = tl.where(stay, p * (dp - delta[:, None]), zero)
        acc = tl.dot(ds.to(k.dtype), tl.trans(k), acc, input_precision=PRECISION)
        col, number, low, high, later = next_tile(
            full_col, full_end, slow_full, part_col, part, part_tile, cols_any, later, i + 1, steps, BLOCK, BN, MIXED
        )

    acc = acc * scale
    if SPLIT:
        if scratch >= 0:
            slot_rows = (bh.to(tl.int64) * scratch_stride + scratch) * room + sub * BM + tl.arange(0, BM)
            tl.store(SCRATCH + slot_rows[:, None] * DP + d[None, :], acc)
            return
    tl.store(
        Q_GRAD + place[:, None] * D + d[None, :],
        acc.to(Q_GRAD.dtype.element_ty),
        mask=inside_both(exists, d, D, DP, 1),
    )


@triton.jit(do_not_specialize=CHANGING)
def sum_dq_kernel(
    SCRATCH, Q_GRAD, group, splits,
    heads, n_queries, start, first_row, n_rows, scratch_stride, room, group_b, group_h,
    D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr, BM: tl.constexpr, SUBS: tl.constexpr,
):  # fmt: skip
    """Sum a row's splits in the order of its list."""
    program = tl.program_id(0)
    sub = program % SUBS
    bh = program // SUBS // n_rows
    row = program // SUBS % n_rows
    slot = tl.load(group + bh // heads * group_b + bh % heads * group_h) * n_rows + row
    count = tl.load(splits + slot * 2 + 1)
    if count == 0:
        return
    query, _, _, exists = rows_of(row, first_row, start, n_queries, sub, BLOCK, BM, 1)
    d = tl.arange(0, DP)
    first = bh.to(tl.int64) * scratch_stride + tl.load(splits + slot * 2)
    acc = tl.zeros([BM, DP], tl.float32)
    for split in range(count):
        place = (first + split) * room + sub * BM + tl.arange(0, BM)
        acc += tl.load(SCRATCH + place[:, None] * DP + d[None, :])
    place = bh.to(tl.int64) * n_queries + query
    tl.store(
        Q_GRAD + place[:, None] * D + d[None, :], acc.to(Q_GRAD.dtype.element_ty), mask=inside_both(exists, d, D, DP, 1)
    )


@triton.jit(do_not_specialize=[name for name in CHANGING if name not in ("n_queries", "start", "size")])
def dkdv_kernel(
    Q, K, V, OUT_GRAD, STATS, K_GRAD, V_GRAD, SCRATCH,
    group, work, begin, full_ptr, full_row, part_ptr, part_row, part_tile, bits, rows_any,
    key_bits, key_lengths, seed, row_at, col_at, head_at, batch_at,
    natural, scale, dropout_scale, threshold,
    heads, ratio, n_queries, n_keys, start, first_row, n_cols, longest, scratch_stride, whole_base, key_words, size,
    group_b, group_h,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, g_b, g_h, g_n,
    D: tl.constexpr, E: tl.constexpr, DP: tl.constexpr, EP: tl.constexpr,
    BLOCK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SUBS: tl.constexpr, LOOPED: tl.constexpr,
    SIGN: tl.constexpr, PRECISION: tl.constexpr, FAR: tl.constexpr, RAGGED_ROWS: tl.constexpr,
    RAGGED_KEYS: tl.constexpr, HAS_BITS: tl.constexpr, HAS_LENGTHS: tl.constexpr, DROPOUT: tl.constexpr,
    PLACED: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute one split of a column tile's list for LOOPED query heads. Sums over heads and splits come later."""
    program = tl.program_id(0)
    sub = program % SUBS
    outer = program // SUBS // longest
    programs_a_batch = heads // LOOPED
    b = outer // programs_a_batch
    first_head = outer % programs_a_batch * LOOPED
    g = tl.load(group + b * group_b + first_head * group_h)
    item = tl.load(begin + g) + program // SUBS % longest
    if item >= tl.load(begin + g + 1):
        return
    slot = tl.load(work + item * 4)
    full, full_end, part, part_end = stretch(
        full_ptr, part_ptr, slot, tl.load(work + item * 4 + 1), tl.load(work + item * 4 + 2)
    )
    scratch = tl.load(work + item * 4 + 3)
    col = slot - g * n_cols
    inside = sub * BN + tl.arange(0, BN)
    key = col * BLOCK + inside
    exists = key < n_keys

    d, e, m = tl.arange(0, DP), tl.arange(0, EP), tl.arange(0, BM)
    if FAR:
        m = m.to(tl.int64)
    kv_head = (first_head // ratio).to(tl.int64)
    k_rows = b.to(tl.int64) * k_b + kv_head * k_h + key.to(tl.int64) * k_n
    v_rows = b.to(tl.int64) * v_b + kv_head * v_h + key.to(tl.int64) * v_n
    k = tl.load(K + k_rows[:, None] + d[None, :], mask=inside_both(exists, d, D, DP, 1), other=0.0)
    v = tl.load(V + v_rows[:, None] + e[None, :], mask=inside_both(exists, e, E, EP, 1), other=0.0)
    if SIGN != 1:
        k = k * SIGN
    # Whether the slow loop takes full tiles too, without bits.
    MIXED: tl.constexpr = HAS_BITS or HAS_LENGTHS
    key_length = n_keys
    if HAS_LENGTHS:
        key_length = tl.minimum(tl.load(key_lengths + b), n_keys).to(tl.int32)
    at_key = col * BLOCK + sub * BN
    if MIXED:
        kept_keys = keys_kept(key_bits + b.to(tl.int64) * key_words, key_length, at_key, n_keys, HAS_BITS, BN)
    k_acc = tl.zeros([BN, DP], tl.float32)
    v_acc = tl.zeros([BN, EP], tl.float32)
    zero = natural - natural  # LLVM would choose after the conversion to half types, which costs more
    if DROPOUT:
        seed_value = tl.load(seed)
        batch_number = number_of(b, batch_at, PLACED)
        key_position = position_of(at_key, col, col, col_at, BLOCK, PLACED)
    slow_full = 0
    if HAS_BITS or HAS_LENGTHS:
        slow_full = full_end - full

    PER: tl.constexpr = BLOCK // BM
    for looped in range(LOOPED):
        h = (first_head + looped).to(tl.int64)
        if DROPOUT:
            head_number = number_of(h, head_at, PLACED)
        q_head = Q + b.to(tl.int64) * q_b + h * q_h
        g_head = OUT_GRAD + b.to(tl.int64) * g_b + h * g_h
        stats = STATS + (b * heads + h) * n_queries
        q_places = m[None, :] * q_n + d[:, None]
        g_places = m[:, None] * g_n + e[None, :]
        steps = (full_end - slow_full - full) * PER
        m0 = (first_row + listed(full_row + full, 0, steps, PER)) * BLOCK - start
        later = listed(full_row + full, 1, steps, PER)
        for i in tl.range(0, steps, num_stages=STAGES):
            row = (m0 + start) // BLOCK - first_row
            q_tile = q_head + m0.to(tl.int64) * q_n
            g_tile = g_head + m0.to(tl.int64) * g_n
            if RAGGED_ROWS or D != DP or E != EP:
                # A query that does not exist has an lse of inf, so its weights are 0.
                there = (m0 + m >= 0) & (m0 + m < n_queries)
                q = tl.load(q_tile + q_places, mask=inside_both(there, d, D, DP, 0), other=0.0)
                out_grad = tl.load(g_tile + g_places, mask=inside_both(there, e, E, EP, 1), other=0.0)
                lse = tl.load(stats + m0 + m, mask=there, other=float("inf"))
                delta = tl.load(stats + size + m0 + m, mask=there, other=0.0)
            else:
                q = tl.load(q_tile + q_places)
                out_grad = tl.load(g_tile + g_places)
                lse = tl.load(stats + m0 + m)
                delta = tl.load(stats + size + m0 + m)
            s = tl.dot(k, q, input_precision=PRECISION)
            p = weights(s, natural, lse[None, :])
            if DROPOUT:
                at = position_of(m0 + m + start, row, first_row + row, row_at, BLOCK, PLACED)
                stays = survives_transposed(seed_value, batch_number, head_number, at, key_position, threshold, BM, BN)
                weight = tl.where(stays, p, 0.0)
                dp = tl.dot(v, tl.trans(out_grad), input_precision=PRECISION)
                dp = tl.where(stays, dp, 0.0) - delta[None, :]
            else:
                weight = p
                dp = tl.broadcast_to(-delta[None, :], [BN, BM])
                dp = tl.dot(v, tl.trans(out_grad), dp, input_precision=PRECISION)
            v_acc = tl.dot(weight.to(out_grad.dtype), out_grad, v_acc, input_precision=PRECISION)
            ds = p * dp
            k_acc = tl.dot(ds.to(q.dtype), tl.trans(q), k_acc, input_precision=PRECISION)
            # The tile after the next is in registers already, so that copies wait for no list.
            m0 = (first_row + later) * BLOCK + (i + 1) % PER * BM - start
            later = listed(full_row + full, i + 2, steps, PER)

        steps = (slow_full + part_end - part) * PER
        later = number_at(part_tile, part, slow_full, 0, steps, PER, MIXED)
        row, number, low, high, later = next_tile(
            full_row, full_end, slow_full, part_row, part, part_tile, rows_any, later, 0, steps, BLOCK, BM, MIXED
        )
        for i in tl.range(0, steps, num_stages=STAGES):
            words = words_of(bits, number, i, slow_full, inside, BLOCK, BM, MIXED, False)
            m0 = (first_row + row) * BLOCK + i % PER * BM - start
            there = any_kept(low, high, BM)
            if RAGGED_ROWS:
                real = (m0 + m >= 0) & (m0 + m < n_queries)
                there = there & real
                lse = tl.load(stats + m0 + m, mask=real, other=float("inf"))
                delta = tl.load(stats + size + m0 + m, mask=real, other=0.0)
            else:
                lse = tl.load(stats + m0 + m)
                delta = tl.load(stats + size + m0 + m)
            if RAGGED_KEYS:
                there = there & expanded_row(seen_by(words, exists), BM)
            if MIXED:
                # A row that a key mask emptied has no weights, and we do not read its values.
                there = there & (lse != float("inf"))
            q = tl.load(q_head + m0.to(tl.int64) * q_n + q_places, mask=inside_both(there, d, D, DP, 0), other=0.0)
            out_grad = tl.load(
                g_head + m0.to(tl.int64) * g_n + g_places, mask=inside_both(there, e, E, EP, 1), other=0.0
            )
            # Rows that do not exist have an lse of inf, so their weights are 0.
            keep = expanded(words, BN, BM, False)
            if RAGGED_ROWS:
                # A key that only rows beyond the lengths keep may be NaN, which no weight of 0 removes.
                keep = keep & there[None, :]
            if MIXED:
                keep = keep & kept_keys[:, None]
            s = tl.dot(k, q, input_precision=PRECISION)
            p = tl.where(keep, weights(s, natural, lse[None, :]), zero)
            if DROPOUT:
                at = position_of(m0 + m + start, row, first_row + row, row_at, BLOCK, PLACED)
                stays = survives_transposed(seed_value, batch_number, head_number, at, key_position, threshold, BM, BN)
                weight = tl.where(stays, p, 0.0)
                dp = tl.dot(v, tl.trans(out_grad), input_precision=PRECISION)
                dp = tl.where(stays, dp, 0.0) - delta[None, :]
            else:
                weight = p
                dp = tl.broadcast_to(-delta[None, :], [BN, BM])
                dp = tl.dot(v, tl.trans(out_grad), dp, input_precision=PRECISION)
            v_acc = tl.dot(weight.to(out_grad.dtype), out_grad, v_acc, input_precision=PRECISION)
            ds = tl.where(keep, p * dp, zero)
            k_acc = tl.dot(ds.to(q.dtype), tl.trans(q), k_acc, input_precision=PRECISION)
            row, number, low, high, later = next_tile(
                full_row, full_end, slow_full, part_row, part, part_tile, rows_any, later, i + 1, steps,
                BLOCK, BM, MIXED,
            )  # fmt: skip

    k_acc = k_acc * scale
    if DROPOUT:
        v_acc = v_acc * dropout_scale
    if SPLIT:
        if (scratch >= 0) | (LOOPED < ratio):
            whole = whole_base + outer.to(tl.int64) * n_cols + col
            number = tl.where(scratch >= 0, outer.to(tl.int64) * scratch_stride + scratch, whole)
            slot_rows = number * (SUBS * BN) + inside
            tl.store(SCRATCH + slot_rows[:, None] * (DP + EP) + d[None, :], k_acc)
            tl.store(SCRATCH + slot_rows[:, None] * (DP + EP) + DP + e[None, :], v_acc)
            return
    place = (b.to(tl.int64) * (heads // ratio) + kv_head) * n_keys + key
    tl.store(K_GRAD + place[:, None] * D + d[None, :], k_acc.to(K_GRAD.dtype.element_ty),
             mask=inside_both(exists, d, D, DP, 1))  # fmt: skip
    tl.store(V_GRAD + place[:, None] * E + e[None, :], v_acc.to(V_GRAD.dtype.element_ty),
             mask=inside_both(exists, e, E, EP, 1))  # fmt: skip


@triton.jit(do_not_specialize=CHANGING)
def sum_dkdv_kernel(
    SCRATCH, K_GRAD, V_GRAD, group, splits,
    heads, ratio, n_keys, n_cols, scratch_stride, whole_base, group_b, group_h,
    D: tl.constexpr, E: tl.constexpr, DP: tl.constexpr, EP: tl.constexpr, BLOCK: tl.constexpr, BN: tl.constexpr,
    LOOPED: tl.constexpr,
):  # fmt: skip
    """Sum a column's heads and splits in order."""
    subs: tl.constexpr = BLOCK // BN
    program = tl.program_id(0)
    inside = program % subs * BN + tl.arange(0, BN)
    col = program // subs % n_cols
    outer = program // subs // n_cols
    b = outer // (heads // ratio)
    first_head = outer % (heads // ratio) * ratio
    d, e = tl.arange(0, DP), tl.arange(0, EP)
    k_acc = tl.zeros([BN, DP], tl.float32)
    v_acc = tl.zeros([BN, EP], tl.float32)
    parts = ratio // LOOPED
    for part in range(parts):
        slot = tl.load(group + b * group_b + (first_head + part * LOOPED) * group_h) * n_cols + col
        count = tl.load(splits + slot * 2 + 1)
        source = (outer * parts + part).to(tl.int64)
        first = source * scratch_stride + tl.load(splits + slot * 2)
        first = tl.where(count > 0, first, whole_base + source * n_cols + col)
        # A column that one program computed is in place.
        for number in range(tl.where(count == 0, (parts > 1).to(tl.int32), count)):
            slot_rows = (first + number) * BLOCK + inside
            k_acc += tl.load(SCRATCH + slot_rows[:, None] * (DP + EP) + d[None, :])
            v_acc += tl.load(SCRATCH + slot_rows[:, None] * (DP + EP) + DP + e[None, :])
    slot = tl.load(group + b * group_b + first_head * group_h) * n_cols + col
    if (parts > 1) | (tl.load(splits + slot * 2 + 1) > 0):
        key = col * BLOCK + inside
        place = outer.to(tl.int64) * n_keys + key
        exists = key < n_keys
        tl.store(K_GRAD + place[:, None] * D + d[None, :], k_acc.to(K_GRAD.dtype.element_ty),
                 mask=inside_both(exists, d, D, DP, 1))  # fmt: skip
        tl.store(V_GRAD + place[:, None] * E + e[None, :], v_acc.to(V_GRAD.dtype.element_ty),
                 mask=inside_both(exists, e, E, EP, 1))  # fmt: skip
