"""The backward kernels: statistics of the rows, dQ along rows, dK and dV along columns. No addition is atomic.

Suffixes: ``M`` queries of a tile, ``N`` keys of a tile, ``D`` head dim, ``E`` value dim. ``STATS`` is
``[2, B, H, N]`` float32: lse (inf if a row is empty, so that its weights are 0), and the sum over a row of
out times its gradient, less the gradient of lse, over the scale of dropout, which the end results are multiplied by.
"""

import triton
import triton.language as tl

from ringtile.kernels.triton import tiles


@triton.jit(do_not_specialize=tiles.CHANGING)
def stats_kernel(
    OUT, OUT_GRAD, LSE, LSE_GRAD, STATS, heads, n_queries, size, dropout_scale, strides,
    HAS_LSE_GRAD: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(n_queries, C.BM)
    program = tl.program_id(0)
    bh = program // blocks
    b, h = (bh // heads).to(tl.int64), (bh % heads).to(tl.int64)
    query = program % blocks * C.BM + tl.arange(0, C.BM)
    exists = query < n_queries
    e = tl.arange(0, C.EP)
    mask = exists[:, None] & (e < C.E)[None, :]
    row = query.to(tl.int64)
    o_rows = tiles.place_of(strides.o, b, h) + row * strides.o.n
    out = tl.load(OUT + o_rows[:, None] + e[None, :], mask=mask, other=0.0)
    g_rows = tiles.place_of(strides.g, b, h) + row * strides.g.n
    grad = tl.load(OUT_GRAD + g_rows[:, None] + e[None, :], mask=mask, other=0.0)
    delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    place = bh.to(tl.int64) * n_queries + query
    lse = tl.load(LSE + place, mask=exists, other=float("-inf"))
    if HAS_LSE_GRAD:
        delta -= tl.load(LSE_GRAD + place, mask=exists, other=0.0)
    empty = lse == float("-inf")
    tl.store(STATS + place, tl.where(empty, float("inf"), lse), mask=exists)
    tl.store(STATS + size + place, tl.where(empty, 0.0, delta) / dropout_scale, mask=exists)


@triton.jit
def _dq_step(
    q, k, v, out_grad, lse, delta, stay, acc, natural, zero, draw, n0, col, at, threshold,
    C: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Return the sum with one more tile of keys. MASKED: ``stay`` contains the kept pairs."""
    s = tl.dot(q, k, input_precision=C.PRECISION)
    p = tiles.weights(s, natural, lse[:, None])
    dp = tl.dot(out_grad, v, input_precision=C.PRECISION)
    dp = tiles.survivors(dp, draw, n0, col, at, threshold, C)
    ds = p * (dp - delta[:, None])
    if MASKED:
        ds = tl.where(stay, ds, zero)
    return tl.dot(ds.to(k.dtype), tl.trans(k), acc, input_precision=C.PRECISION)


@triton.jit(do_not_specialize=tiles.CHANGING)
def dq_kernel(
    Q, K, V, K_TILES, V_TILES, OUT_GRAD, STATS, Q_GRAD, SCRATCH, lists, key_bits, key_lengths, seed, at,
    natural, scale, dropout_scale, threshold,
    heads, ratio, n_queries, n_keys, start, first_row, n_rows, longest, scratch_stride, room, key_words, size,
    group_b, group_h, strides, C: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    sub = program % C.SUBS
    bh = program // C.SUBS // longest
    b = bh // heads
    h = bh % heads
    g = tl.load(lists.group + b * group_b + h * group_h)
    item = tl.load(lists.begin + g) + program // C.SUBS % longest
    if item >= tl.load(lists.begin + g + 1):
        return
    slot, full, full_end, part, part_end, scratch = tiles.split_of(lists, item)
    row_tile = slot - g * n_rows
    query, inside, _, exists = tiles.rows_of(row_tile, first_row, start, n_queries, sub, C)

    d, e, n = tl.arange(0, C.DP), tl.arange(0, C.EP), tl.arange(0, C.BN)
    if C.FAR:
        n = n.to(tl.int64)
    row = query.to(tl.int64)
    q_rows = tiles.place_of(strides.q, b, h) + row * strides.q.n
    q = tl.load(Q + q_rows[:, None] + d[None, :], mask=tiles.inside_both(exists, d, C.D, C.DP, 1), other=0.0)
    if C.SIGN != 1:
        q = q * C.SIGN
    g_rows = tiles.place_of(strides.g, b, h) + row * strides.g.n
    out_grad = tl.load(
        OUT_GRAD + g_rows[:, None] + e[None, :], mask=tiles.inside_both(exists, e, C.E, C.EP, 1), other=0.0
    )
    place = bh.to(tl.int64) * n_queries + query
    lse = tl.load(STATS + place, mask=exists, other=float("inf"))
    delta = tl.load(STATS + size + place, mask=exists, other=0.0)
    kv_head = (h // ratio).to(tl.int64)
    K += tiles.place_of(strides.k, b, kv_head)
    V += tiles.place_of(strides.v, b, kv_head)
    k_places = n[None, :] * strides.k.n + d[:, None]
    v_places = n[None, :] * strides.v.n + e[:, None]
    BM: tl.constexpr = C.BM
    DP: tl.constexpr = C.DP
    acc = tl.zeros([BM, DP], tl.float32)
    zero = natural - natural  # LLVM would choose after the conversion to half types, which costs more
    draw = None
    if C.DROPOUT:
        seed_value, batch_number = tl.load(seed), tiles.number_of(b, at.batch_at, C)
        head_number = tiles.number_of(h, at.head_at, C)
        position = tiles.position_of(query + start, row_tile, first_row + row_tile, at.row_at, C)
        draw = seed_value, batch_number, head_number, position

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
        v = tiles.whole_tile(V, strides.v.n, V_TILES, b, h // ratio, n0, n, e, C.E, C.EP, C, True)
        acc = _dq_step(q, k, v, out_grad, lse, delta, None, acc, natural, zero, draw, n0, col, at, threshold, C, False)
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
        stay = tiles.expanded(words, C.BM, C.BN, False)
        if MIXED:
            kept = kept & tiles.keys_kept(key_bits, b, key_words, key_length, n0, n_keys, C)
            stay = stay & kept[None, :]
        k_tile = K + n0.to(tl.int64) * strides.k.n
        k = tl.load(k_tile + k_places, mask=tiles.inside_both(kept, d, C.D, C.DP, 0), other=0.0)
        v_tile = V + n0.to(tl.int64) * strides.v.n
        v = tl.load(v_tile + v_places, mask=tiles.inside_both(kept, e, C.E, C.EP, 0), other=0.0)
        acc = _dq_step(q, k, v, out_grad, lse, delta, stay, acc, natural, zero, draw, n0, col, at, threshold, C, True)
        col, number, low, high, later = tiles.next_tile(
            lists, full_end, slow_full, part, later, i + 1, steps, C.BLOCK, C.BN, MIXED
        )

    # A gradient of 0 times a key of -inf is NaN.
    acc = tl.where((lse != float("inf"))[:, None], acc * scale, 0.0)
    if C.SPLIT:
        if scratch >= 0:
            slot_rows = (bh.to(tl.int64) * scratch_stride + scratch) * room + sub * C.BM + tl.arange(0, C.BM)
            tl.store(SCRATCH + slot_rows[:, None] * C.DP + d[None, :], acc)
            return
    _store(Q_GRAD, place, acc, exists, C.D, C.DP)


@triton.jit
def _store(X, rows, values, exists, D: tl.constexpr, DP: tl.constexpr):
    """Store rows of a contiguous tensor of head dim D."""
    d = tl.arange(0, DP)
    mask = tiles.inside_both(exists, d, D, DP, 1)
    tl.store(X + rows[:, None] * D + d[None, :], values.to(X.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=tiles.CHANGING)
def sum_dq_kernel(
    SCRATCH, Q_GRAD, group, splits,
    heads, n_queries, start, first_row, n_rows, scratch_stride, room, group_b, group_h, C: tl.constexpr,
):  # fmt: skip
    """Sum a row's splits in the order of its list."""
    program = tl.program_id(0)
    sub = program % C.SUBS
    bh = program // C.SUBS // n_rows
    row = program // C.SUBS % n_rows
    slot = tl.load(group + bh // heads * group_b + bh % heads * group_h) * n_rows + row
    count = tl.load(splits + slot * 2 + 1)
    if count == 0:
        return
    query, _, _, exists = tiles.rows_of(row, first_row, start, n_queries, sub, C)
    d = tl.arange(0, C.DP)
    first = bh.to(tl.int64) * scratch_stride + tl.load(splits + slot * 2)
    BM: tl.constexpr = C.BM
    DP: tl.constexpr = C.DP
    acc = tl.zeros([BM, DP], tl.float32)
    for split in range(count):
        place = (first + split) * room + sub * C.BM + tl.arange(0, C.BM)
        acc += tl.load(SCRATCH + place[:, None] * C.DP + d[None, :])
    _store(Q_GRAD, bh.to(tl.int64) * n_queries + query, acc, exists, C.D, C.DP)


@triton.jit
def _column_step(
    k, v, q, out_grad, lse, delta, keep, k_acc, v_acc, natural, zero, draw, m0, row, start, first_row, at, threshold,
    C: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Return the sums of dK and dV with one more tile of queries. MASKED: ``keep`` contains the kept pairs."""
    s = tl.dot(k, q, input_precision=C.PRECISION)
    p = tiles.weights(s, natural, lse[None, :])
    if MASKED:
        p = tl.where(keep, p, zero)
    if C.DROPOUT:
        seed, batch, head, key = draw
        query = tiles.position_of(m0 + tl.arange(0, C.BM) + start, row, first_row + row, at.row_at, C)
        stays = tiles.survives_transposed(seed, batch, head, query, key, threshold, C.BM, C.BN)
        weight = tl.where(stays, p, 0.0)
        dp = tl.dot(v, tl.trans(out_grad), input_precision=C.PRECISION)
        dp = tl.where(stays, dp, 0.0) - delta[None, :]
    else:
        weight = p
        dp = tl.broadcast_to(-delta[None, :], C.BN, C.BM)
        dp = tl.dot(v, tl.trans(out_grad), dp, input_precision=C.PRECISION)
    v_acc = tl.dot(weight.to(out_grad.dtype), out_grad, v_acc, input_precision=C.PRECISION)
    ds = p * dp
    if MASKED:
        ds = tl.where(keep, ds, zero)
    return tl.dot(ds.to(q.dtype), tl.trans(q), k_acc, input_precision=C.PRECISION), v_acc


@triton.jit(do_not_specialize=[name for name in tiles.CHANGING if name not in ("n_queries", "start", "size")])
def dkdv_kernel(
    Q, K, V, OUT_GRAD, STATS, K_GRAD, V_GRAD, SCRATCH, lists, key_bits, key_lengths, seed, at,
    natural, scale, dropout_scale, threshold,
    heads, ratio, n_queries, n_keys, start, first_row, n_cols, longest, scratch_stride, whole_base, key_words, size,
    group_b, group_h, strides, C: tl.constexpr,
):  # fmt: skip
    """Compute one split of a column tile's list for LOOPED query heads. Sums over heads and splits come later."""
    program = tl.program_id(0)
    sub = program % C.SUBS
    outer = program // C.SUBS // longest
    programs_a_batch = heads // C.LOOPED
    b = outer // programs_a_batch
    first_head = outer % programs_a_batch * C.LOOPED
    g = tl.load(lists.group + b * group_b + first_head * group_h)
    item = tl.load(lists.begin + g) + program // C.SUBS % longest
    if item >= tl.load(lists.begin + g + 1):
        return
    slot, full, full_end, part, part_end, scratch = tiles.split_of(lists, item)
    col = slot - g * n_cols
    inside = sub * C.BN + tl.arange(0, C.BN)
    key = col * C.BLOCK + inside
    exists = key < n_keys

    d, e, m = tl.arange(0, C.DP), tl.arange(0, C.EP), tl.arange(0, C.BM)
    if C.FAR:
        m = m.to(tl.int64)
    kv_head = (first_head // ratio).to(tl.int64)
    k_rows = tiles.place_of(strides.k, b, kv_head) + key.to(tl.int64) * strides.k.n
    v_rows = tiles.place_of(strides.v, b, kv_head) + key.to(tl.int64) * strides.v.n
    k = tl.load(K + k_rows[:, None] + d[None, :], mask=tiles.inside_both(exists, d, C.D, C.DP, 1), other=0.0)
    v = tl.load(V + v_rows[:, None] + e[None, :], mask=tiles.inside_both(exists, e, C.E, C.EP, 1), other=0.0)
    if C.SIGN != 1:
        k = k * C.SIGN
    # MIXED: the masked loop also runs full tiles, because a key mask or lengths cut them. It clears the keys that do
    # not exist when it stores.
    MIXED: tl.constexpr = C.HAS_BITS or C.HAS_LENGTHS
    key_length = n_keys
    if C.HAS_LENGTHS:
        key_length = tl.minimum(tl.load(key_lengths + b), n_keys).to(tl.int32)
    at_key = col * C.BLOCK + sub * C.BN
    if MIXED:
        kept_keys = tiles.keys_kept(key_bits, b, key_words, key_length, at_key, n_keys, C)
    BN: tl.constexpr = C.BN
    DP: tl.constexpr = C.DP
    EP: tl.constexpr = C.EP
    k_acc, v_acc = tl.zeros([BN, DP], tl.float32), tl.zeros([BN, EP], tl.float32)
    zero = natural - natural  # LLVM would choose after the conversion to half types, which costs more
    if C.DROPOUT:
        seed_value = tl.load(seed)
        batch_number = tiles.number_of(b, at.batch_at, C)
        key_position = tiles.position_of(at_key, col, col, at.col_at, C)
    slow_full = 0
    if MIXED:
        slow_full = full_end - full

    PER: tl.constexpr = C.BLOCK // C.BM
    for looped in range(C.LOOPED):
        h = (first_head + looped).to(tl.int64)
        draw = None
        if C.DROPOUT:
            draw = seed_value, batch_number, tiles.number_of(h, at.head_at, C), key_position
        q_head = Q + b.to(tl.int64) * strides.q.b + h * strides.q.h
        g_head = OUT_GRAD + b.to(tl.int64) * strides.g.b + h * strides.g.h
        stats = STATS + (b * heads + h) * n_queries
        q_places = m[None, :] * strides.q.n + d[:, None]
        g_places = m[:, None] * strides.g.n + e[None, :]
        steps = (full_end - slow_full - full) * PER
        m0 = (first_row + tiles.listed(lists.full + full, 0, steps, PER)) * C.BLOCK - start
        later = tiles.listed(lists.full + full, 1, steps, PER)
        for i in tl.range(0, steps, num_stages=C.STAGES):
            row = (m0 + start) // C.BLOCK - first_row
            q_tile = q_head + m0.to(tl.int64) * strides.q.n
            g_tile = g_head + m0.to(tl.int64) * strides.g.n
            if C.RAGGED_ROWS or C.D != C.DP or C.E != C.EP:
                # A query that does not exist has an lse of inf, so its weights are 0.
                there = (m0 + m >= 0) & (m0 + m < n_queries)
                q = tl.load(q_tile + q_places, mask=tiles.inside_both(there, d, C.D, C.DP, 0), other=0.0)
                out_grad = tl.load(g_tile + g_places, mask=tiles.inside_both(there, e, C.E, C.EP, 1), other=0.0)
                lse = tl.load(stats + m0 + m, mask=there, other=float("inf"))
                delta = tl.load(stats + size + m0 + m, mask=there, other=0.0)
            else:
                q = tl.load(q_tile + q_places)
                out_grad = tl.load(g_tile + g_places)
                lse = tl.load(stats + m0 + m)
                delta = tl.load(stats + size + m0 + m)
            k_acc, v_acc = _column_step(
                k, v, q, out_grad, lse, delta, None, k_acc, v_acc, natural, zero, draw, m0, row, start, first_row,
                at, threshold, C, False,
            )  # fmt: skip
            # The tile after the next is in registers already, so that copies wait for no list.
            m0 = (first_row + later) * C.BLOCK + (i + 1) % PER * C.BM - start
            later = tiles.listed(lists.full + full, i + 2, steps, PER)

        steps = (slow_full + part_end - part) * PER
        later = tiles.number_at(lists, part, slow_full, 0, steps, PER, MIXED)
        row, number, low, high, later = tiles.next_tile(
            lists, full_end, slow_full, part, later, 0, steps, C.BLOCK, C.BM, MIXED
        )
        for i in tl.range(0, steps, num_stages=C.STAGES):
            words = tiles.words_of(lists.bits, number, i, slow_full, inside, C.BLOCK, C.BM, MIXED, False)
            m0 = (first_row + row) * C.BLOCK + i % PER * C.BM - start
            there = tiles.any_kept(low, high, C.BM)
            if C.RAGGED_ROWS:
                real = (m0 + m >= 0) & (m0 + m < n_queries)
                there = there & real
                lse = tl.load(stats + m0 + m, mask=real, other=float("inf"))
                delta = tl.load(stats + size + m0 + m, mask=real, other=0.0)
            else:
                lse = tl.load(stats + m0 + m)
                delta = tl.load(stats + size + m0 + m)
            if C.RAGGED_KEYS:
                there = there & tiles.expanded_row(tiles.seen_by(words, exists), C.BM)
            if MIXED:
                # A row that a key mask emptied has no weights, and we do not read its values.
                there = there & (lse != float("inf"))
            q_tile = q_head + m0.to(tl.int64) * strides.q.n
            q = tl.load(q_tile + q_places, mask=tiles.inside_both(there, d, C.D, C.DP, 0), other=0.0)
            g_tile = g_head + m0.to(tl.int64) * strides.g.n
            out_grad = tl.load(g_tile + g_places, mask=tiles.inside_both(there, e, C.E, C.EP, 1), other=0.0)
            # Rows that do not exist have an lse of inf, so their weights are 0.
            keep = tiles.expanded(words, C.BN, C.BM, False)
            if C.RAGGED_ROWS:
                # A key that only rows beyond the lengths keep may be NaN, which no weight of 0 removes.
                keep = keep & there[None, :]
            if MIXED:
                keep = keep & kept_keys[:, None]
            k_acc, v_acc = _column_step(
                k, v, q, out_grad, lse, delta, keep, k_acc, v_acc, natural, zero, draw, m0, row, start, first_row,
                at, threshold, C, True,
            )  # fmt: skip
            row, number, low, high, later = tiles.next_tile(
                lists, full_end, slow_full, part, later, i + 1, steps, C.BLOCK, C.BM, MIXED
            )

    k_acc = k_acc * scale
    if C.DROPOUT:
        v_acc = v_acc * dropout_scale
    if C.SPLIT:
        if (scratch >= 0) | (C.LOOPED < ratio):
            # Slots of splits come first. Behind them, each head has a slot for every column without splits.
            whole = whole_base + outer.to(tl.int64) * n_cols + col
            number = tl.where(scratch >= 0, outer.to(tl.int64) * scratch_stride + scratch, whole)
            slot_rows = number * (C.SUBS * C.BN) + inside
            tl.store(SCRATCH + slot_rows[:, None] * (C.DP + C.EP) + d[None, :], k_acc)
            tl.store(SCRATCH + slot_rows[:, None] * (C.DP + C.EP) + C.DP + e[None, :], v_acc)
            return
    place = (b.to(tl.int64) * (heads // ratio) + kv_head) * n_keys + key
    _store(K_GRAD, place, k_acc, exists, C.D, C.DP)
    _store(V_GRAD, place, v_acc, exists, C.E, C.EP)


@triton.jit(do_not_specialize=tiles.CHANGING)
def sum_dkdv_kernel(
    SCRATCH, K_GRAD, V_GRAD, group, splits,
    heads, ratio, n_keys, n_cols, scratch_stride, whole_base, group_b, group_h, C: tl.constexpr,
):  # fmt: skip
    """Sum a column's heads and splits in order."""
    subs: tl.constexpr = C.BLOCK // C.BN
    program = tl.program_id(0)
    inside = program % subs * C.BN + tl.arange(0, C.BN)
    col = program // subs % n_cols
    outer = program // subs // n_cols
    b = outer // (heads // ratio)
    first_head = outer % (heads // ratio) * ratio
    d, e = tl.arange(0, C.DP), tl.arange(0, C.EP)
    BN: tl.constexpr = C.BN
    DP: tl.constexpr = C.DP
    EP: tl.constexpr = C.EP
    k_acc, v_acc = tl.zeros([BN, DP], tl.float32), tl.zeros([BN, EP], tl.float32)
    # With 8 query heads to a key head and LOOPED = 2, 4 programs computed a column.
    parts = ratio // C.LOOPED
    for part in range(parts):
        slot = tl.load(group + b * group_b + (first_head + part * C.LOOPED) * group_h) * n_cols + col
        count = tl.load(splits + slot * 2 + 1)
        source = (outer * parts + part).to(tl.int64)
        first = source * scratch_stride + tl.load(splits + slot * 2)
        first = tl.where(count > 0, first, whole_base + source * n_cols + col)
        # A column that one program computed is in place.
        for number in range(tl.where(count == 0, (parts > 1).to(tl.int32), count)):
            slot_rows = (first + number) * C.BLOCK + inside
            k_acc += tl.load(SCRATCH + slot_rows[:, None] * (C.DP + C.EP) + d[None, :])
            v_acc += tl.load(SCRATCH + slot_rows[:, None] * (C.DP + C.EP) + C.DP + e[None, :])
    slot = tl.load(group + b * group_b + first_head * group_h) * n_cols + col
    if (parts > 1) | (tl.load(splits + slot * 2 + 1) > 0):
        key = col * C.BLOCK + inside
        place = outer.to(tl.int64) * n_keys + key
        _store(K_GRAD, place, k_acc, key < n_keys, C.D, C.DP)
        _store(V_GRAD, place, v_acc, key < n_keys, C.E, C.EP)
