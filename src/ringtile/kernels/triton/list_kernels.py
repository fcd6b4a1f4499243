"""The kernels over lists of keys per query: forward and dQ of one query, dK and dV in parts, and their sums.

A program of the first two computes the query heads of one query that share a key head, so a key is gathered once for
BM of them. Suffixes and the scale are those of `forward_kernels`, ``STATS`` that of `backward_kernels`. A place is an
entry's number in its list times the block, plus the number of a key in the entry.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ringtile.kernels.triton.tiles import CHANGING, LOWEST, online_softmax_step, place_of, weights

_CHANGING = (
    *(*CHANGING, "kv_heads", "length", "groups", "indices_b", "limits_b", "first_query", "queries", "chunk"),
    *("pieces", "entries", "slots", "items"),
)


class Constants(NamedTuple):
    """What is compiled in. A program computes BM query heads, or pairs of query and head, and BN keys."""

    D: int
    E: int
    DP: int
    """First dims of keys, a power of two: 512 of 576."""
    DR: int
    """The rest of them, padded to a power of two, or 0."""
    EP: int
    BLOCK: int
    BM: int
    BN: int
    SIGN: int
    PRECISION: str
    STAGES: int
    SHARED: bool
    """The values are the first DP dims of the keys, so they are gathered once."""
    BY_ENTRY: bool
    """Parts of dK and dV are those of an entry from some queries, otherwise those of a query for some places."""


@triton.jit
def _rows(X, places, there, FIRST: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr):
    """Load WIDTH dims of rows, from dim FIRST of DIM, and 0 where there is none."""
    d = FIRST + tl.arange(0, WIDTH)
    mask = there[:, None]
    if DIM < FIRST + WIDTH:
        mask = mask & (d < DIM)[None, :]
    return tl.load(X + places[:, None] + d[None, :], mask=mask, other=0.0)


@triton.jit
def _store(X, places, values, there, FIRST: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr):
    d = FIRST + tl.arange(0, WIDTH)
    mask = there[:, None] & (d < DIM)[None, :]
    tl.store(X + places[:, None] + d[None, :], values.to(X.dtype.element_ty), mask=mask)


@triton.jit
def _limits(limits, b, query, limits_b, n_keys):
    at = limits + b.to(tl.int64) * limits_b + query.to(tl.int64) * 2
    return tl.maximum(tl.load(at), 0), tl.minimum(tl.load(at + 1), n_keys)


@triton.jit
def _list_of(indices, b, h, query, kv_heads, groups, indices_b, n_queries, length):
    """Return the list of a query and key head."""
    row = (h * groups // kv_heads).to(tl.int64) * n_queries + query
    return indices + b.to(tl.int64) * indices_b + row * length


@triton.jit
def _span(entries, length, low, high, C: tl.constexpr):
    """Return the first place of a list that can be within the limits, and the last one plus 1."""
    first, last = 0, 0
    for at in range(0, length, 1024):
        number = at + tl.arange(0, 1024)
        entry = tl.load(entries + number, mask=number < length, other=-1).to(tl.int64)
        first += tl.sum(((entry >= 0) & ((entry + 1) * C.BLOCK <= low)).to(tl.int32))
        last += tl.sum(((entry >= 0) & (entry * C.BLOCK < high)).to(tl.int32))
    return first * C.BLOCK, last * C.BLOCK


@triton.jit
def _keys(entries, at, last, low, high, C: tl.constexpr):
    """Return the keys of BN places, and which of them count. -1 leads to a negative one, which does not."""
    place = at + tl.arange(0, C.BN)
    entry = tl.load(entries + place // C.BLOCK, mask=place < last, other=-1).to(tl.int64)
    key = entry * C.BLOCK + place % C.BLOCK
    return key, (key >= low) & (key < high)


@triton.jit
def _pair(X, places, there, C: tl.constexpr):
    """Load rows of queries or keys: their first DP dims, and the DR others, if there are any."""
    x = _rows(X, places, there, 0, C.DP, C.D)
    rest = x
    if C.DR:
        rest = _rows(X, places, there, C.DP, C.DR, C.D)
    return x, rest


@triton.jit
def _product(x, y, C: tl.constexpr):
    """Return the product of queries with keys, of the sign of the scale."""
    s = tl.dot(x[0], tl.trans(y[0]), input_precision=C.PRECISION)
    if C.DR:
        s = tl.dot(x[1], tl.trans(y[1]), s, input_precision=C.PRECISION)
    return s * C.SIGN


@triton.jit
def _no_sums(ROWS: tl.constexpr, C: tl.constexpr):
    """Return sums of rows as `_pair` returns rows."""
    DP: tl.constexpr = C.DP
    DR: tl.constexpr = C.DR
    x = tl.zeros([ROWS, DP], tl.float32)
    rest = x
    if DR:
        rest = tl.zeros([ROWS, DR], tl.float32)
    return x, rest


@triton.jit
def _added(sums, weight, x, C: tl.constexpr):
    """Return sums with the product of weights and rows."""
    first = tl.dot(weight, x[0], sums[0], input_precision=C.PRECISION)
    rest = first
    if C.DR:
        rest = tl.dot(weight, x[1], sums[1], input_precision=C.PRECISION)
    return first, rest


@triton.jit
def _store_pair(X, places, x, there, scale, C: tl.constexpr):
    _store(X, places, x[0] * scale, there, 0, C.DP, C.D)
    if C.DR:
        _store(X, places, x[1] * scale, there, C.DP, C.DR, C.D)


@triton.jit
def _heads(program, ratio, n_queries, kv_heads, C: tl.constexpr):
    """Return batch element, key head, query, the query heads of a program, and which of them exist."""
    # The heads of a query are neighbours, then queries: those of equal keys run at once.
    parts = tl.cdiv(ratio, C.BM)
    query = program // parts % n_queries
    bh = program // parts // n_queries
    inside = program % parts * C.BM + tl.arange(0, C.BM)
    h = bh % kv_heads
    return bh // kv_heads, h, query, h * ratio + inside, inside < ratio


@triton.jit(do_not_specialize=_CHANGING)
def forward_kernel(
    Q, K, V, OUT, LSE, indices, limits, c, natural,
    heads, kv_heads, ratio, n_queries, n_keys, length, groups, indices_b, limits_b, strides, C: tl.constexpr,
):  # fmt: skip
    b, h, query, head, exists = _heads(tl.program_id(0), ratio, n_queries, kv_heads, C)
    entries = _list_of(indices, b, h, query, kv_heads, groups, indices_b, n_queries, length)
    low, high = _limits(limits, b, query, limits_b, n_keys)
    first, last = _span(entries, length, low, high, C)
    q = _pair(Q, place_of(strides.q, b, head) + query.to(tl.int64) * strides.q.n, exists, C)
    K += place_of(strides.k, b, h)
    V += place_of(strides.v, b, h)
    BM: tl.constexpr = C.BM
    EP: tl.constexpr = C.EP
    top = tl.full([BM], LOWEST, tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, EP], tl.float32)
    for at in tl.range(first, last, C.BN, num_stages=C.STAGES):
        key, kept = _keys(entries, at, last, low, high, C)
        k = _pair(K, key * strides.k.n, kept, C)
        s = tl.where(kept[None, :], _product(q, k, C), float("-inf"))
        p, top, total, acc = online_softmax_step(s, c, top, total, acc)
        if C.SHARED:
            v = k[0]
        else:
            v = _rows(V, key * strides.v.n, kept, 0, C.EP, C.E)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=C.PRECISION)
    empty = total == 0.0
    acc = tl.where(empty[:, None], 0.0, acc / tl.where(empty, 1.0, total)[:, None])
    lse = tl.where(empty, float("-inf"), tl.where(empty, 0.0, top) * natural + tl.log(tl.where(empty, 1.0, total)))
    _store(OUT, place_of(strides.o, b, head) + query.to(tl.int64) * strides.o.n, acc, exists, 0, C.EP, C.E)
    tl.store(LSE + (b * heads + head).to(tl.int64) * n_queries + query, lse, mask=exists)


@triton.jit(do_not_specialize=_CHANGING)
def dq_kernel(
    Q, K, V, OUT_GRAD, STATS, Q_GRAD, indices, limits, natural, scale,
    heads, kv_heads, ratio, n_queries, n_keys, length, groups, indices_b, limits_b, size, strides, C: tl.constexpr,
):  # fmt: skip
    b, h, query, head, exists = _heads(tl.program_id(0), ratio, n_queries, kv_heads, C)
    entries = _list_of(indices, b, h, query, kv_heads, groups, indices_b, n_queries, length)
    low, high = _limits(limits, b, query, limits_b, n_keys)
    first, last = _span(entries, length, low, high, C)
    place = (b * heads + head).to(tl.int64) * n_queries + query
    lse = tl.load(STATS + place, mask=exists, other=float("inf"))
    delta = tl.load(STATS + size + place, mask=exists, other=0.0)
    q = _pair(Q, place_of(strides.q, b, head) + query.to(tl.int64) * strides.q.n, exists, C)
    g_rows = place_of(strides.g, b, head) + query.to(tl.int64) * strides.g.n
    out_grad = _rows(OUT_GRAD, g_rows, exists, 0, C.EP, C.E)
    K += place_of(strides.k, b, h)
    V += place_of(strides.v, b, h)
    acc = _no_sums(C.BM, C)
    for at in tl.range(first, last, C.BN, num_stages=C.STAGES):
        key, kept = _keys(entries, at, last, low, high, C)
        k = _pair(K, key * strides.k.n, kept, C)
        p = weights(_product(q, k, C), natural, lse[:, None])
        if C.SHARED:
            v = k[0]
        else:
            v = _rows(V, key * strides.v.n, kept, 0, C.EP, C.E)
        dp = tl.dot(out_grad, tl.trans(v), input_precision=C.PRECISION)
        ds = tl.where(kept[None, :], p * (dp - delta[:, None]), 0.0)
        acc = _added(acc, ds.to(v.dtype), k, C)
    # A gradient of 0 times a key of -inf is NaN.
    has_score = (lse != float("inf"))[:, None]
    acc = tl.where(has_score, acc[0], 0.0), tl.where(has_score, acc[1], 0.0)
    _store_pair(Q_GRAD, place * C.D, acc, exists, scale, C)


@triton.jit(do_not_specialize=_CHANGING)
def dkdv_kernel(
    Q, K, V, OUT_GRAD, STATS, PARTS, indices, limits, order, bounds, starts, owner, natural, scale,
    heads, kv_heads, ratio, n_queries, n_keys, length, groups, indices_b, limits_b, first_query, queries,
    pieces, chunk, entries, items, slots, size, strides, C: tl.constexpr,
):  # fmt: skip
    """Compute a part of dK and dV of BN keys. A part is a piece of the queries that list an entry, or one query."""
    program = tl.program_id(0)
    n = tl.arange(0, C.BN)
    if C.BY_ENTRY:
        SUBS: tl.constexpr = C.BLOCK // C.BN
        sub, piece = program % SUBS, program // SUBS % pieces
        bh = program // SUBS // pieces
        b, h = bh // kv_heads, bh % kv_heads
        table = (tl.where(indices_b > 0, b, 0) * groups + h * groups // kv_heads).to(tl.int64)
        entry = tl.load(owner + table * pieces + piece)
        # There is room for more pieces than there can be.
        if entry >= entries:
            return
        bounds += table * (entries + 1) + entry
        number = piece - tl.load(starts + table * (entries + 1) + entry)
        order += table * items + tl.load(bounds) + number * chunk
        rows = (tl.minimum(tl.load(bounds + 1) - tl.load(bounds) - number * chunk, chunk) * ratio).to(tl.int32)
        begin = entry * C.BLOCK + sub * C.BN
        key = begin + n
        kept = key < n_keys
        slot = piece.to(tl.int64) * C.BLOCK + sub * C.BN + n
        in_list = n >= 0
    else:
        tiles = tl.cdiv(length * C.BLOCK, C.BN)
        at = program % tiles * C.BN
        number = program // tiles % queries
        query = first_query + number
        bh = program // tiles // queries
        b, h = bh // kv_heads, bh % kv_heads
        first, last = _limits(limits, b, query, limits_b, n_keys)
        entries_of = _list_of(indices, b, h, query, kv_heads, groups, indices_b, n_queries, length)
        key, kept = _keys(entries_of, at, length * C.BLOCK, first, last, C)
        in_list = at + n < length * C.BLOCK
        if tl.max(key) < 0:
            return
        rows = ratio
        slot = number.to(tl.int64) * length * C.BLOCK + at + n
    K += place_of(strides.k, b, h)
    V += place_of(strides.v, b, h)
    k = _pair(K, key * strides.k.n, kept, C)
    v = _rows(V, key * strides.v.n, kept, 0, C.EP, C.E)
    BN: tl.constexpr = C.BN
    EP: tl.constexpr = C.EP
    k_acc, v_acc = _no_sums(C.BN, C), tl.zeros([BN, EP], tl.float32)
    for step in tl.range(0, rows, C.BM, num_stages=C.STAGES):
        row = step + tl.arange(0, C.BM)
        there = row < rows
        head = h * ratio + row % ratio
        if C.BY_ENTRY:
            asks = tl.load(order + row // ratio, mask=there, other=0) // length
            low, high = _limits(limits, b, asks, limits_b, n_keys)
            keep = (key[:, None] >= low[None, :]) & (key[:, None] < high[None, :])
            # A row that keeps none of these keys can be NaN.
            there = there & (low < begin + C.BN) & (high > begin) & (low < high)
        else:
            asks = query
            keep = kept[:, None]
        place = (b * heads + head).to(tl.int64) * n_queries + asks
        lse = tl.load(STATS + place, mask=there, other=float("inf"))
        delta = tl.load(STATS + size + place, mask=there, other=0.0)
        there = there & (lse != float("inf"))
        keep = keep & there[None, :]
        q_rows = place_of(strides.q, b, head) + asks.to(tl.int64) * strides.q.n
        q = _pair(Q, q_rows, there, C)
        p = weights(_product(k, q, C), natural, lse[None, :])
        p = tl.where(keep, p, 0.0)
        g_rows = place_of(strides.g, b, head) + asks.to(tl.int64) * strides.g.n
        out_grad = _rows(OUT_GRAD, g_rows, there, 0, C.EP, C.E)
        v_acc = tl.dot(p.to(out_grad.dtype), out_grad, v_acc, input_precision=C.PRECISION)
        dp = tl.dot(v, tl.trans(out_grad), input_precision=C.PRECISION)
        ds = tl.where(keep, p * (dp - delta[None, :]), 0.0)
        k_acc = _added(k_acc, ds.to(v.dtype), q, C)
    # A slot has the sums of a key side by side, first dK, then dV.
    parts = (bh.to(tl.int64) * slots + slot) * (C.D + C.E)
    _store_pair(PARTS, parts, k_acc, in_list, scale, C)
    _store(PARTS, parts + C.D, v_acc, in_list, 0, C.EP, C.E)


@triton.jit(do_not_specialize=_CHANGING)
def sum_kernel(
    PARTS, TOTAL, order, bounds, kv_heads, n_keys, groups, indices_b, entries, items, slots, C: tl.constexpr
):  # fmt: skip
    """Add BM parts of a key at a time to its total, in order, BN of its numbers."""
    program = tl.program_id(0)
    WIDTH: tl.constexpr = C.D + C.E
    BN: tl.constexpr = C.BN
    chunks: tl.constexpr = (WIDTH + BN - 1) // BN
    key = program // chunks % n_keys
    bh = program // chunks // n_keys
    b, h = bh // kv_heads, bh % kv_heads
    table = (tl.where(indices_b > 0, b, 0) * groups + h * groups // kv_heads).to(tl.int64)
    bounds += table * (entries + 1) + key // C.BLOCK
    first, last = tl.load(bounds), tl.load(bounds + 1)
    if first == last:
        return
    d = program % chunks * BN + tl.arange(0, BN)
    acc = tl.zeros([BN], tl.float32)
    for at in range(first, last, C.BM):
        slot = at + tl.arange(0, C.BM).to(tl.int64)
        there = slot < last
        if not C.BY_ENTRY:
            slot = tl.load(order + table * items + slot, mask=there, other=0)
        places = (bh.to(tl.int64) * slots + slot * C.BLOCK + key % C.BLOCK) * WIDTH
        mask = there[:, None] & (d < WIDTH)[None, :]
        acc += tl.sum(tl.load(PARTS + places[:, None] + d[None, :], mask=mask, other=0.0), 0)
    total = TOTAL + (bh.to(tl.int64) * n_keys + key) * WIDTH + d
    tl.store(total, tl.load(total, mask=d < WIDTH) + acc, mask=d < WIDTH)
