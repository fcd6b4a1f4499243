"""The best keys or blocks of each query by the scores of small heads, without the scores of all pairs."""

from itertools import product

import torch
from torch import Tensor
from torch.nn.functional import pad

from ringtile.functional.attention import check_options, checked_tensors
from ringtile.functional.tensors import check_plain, is_real
from ringtile.kernels.contracts import in_bytes
from ringtile.kernels.native import ranks
from ringtile.kernels.native.library import reason_against
from ringtile.patterns import Dense, Pattern
from ringtile.patterns.checks import check_positive
from ringtile.patterns.grammar import as_rule

_SPAN = 1 << 20
"""Most keys or blocks that are ranked at once."""
_BYTES = 1 << 24
"""Most bytes of each of three tensors of a chunk of queries."""
_CACHED = 512, 1 << 21
"""Queries times heads, and bytes of their products, that stay in a processor's second cache."""


@torch.no_grad()
def index_topk(
    query: Tensor,
    key: Tensor,
    n: int,
    *,
    weights: Tensor | None = None,
    relu: bool = False,
    rounded: bool = False,
    groups: int = 1,
    block: int = 1,
    local: int = 0,
    pattern: Pattern | str | None = None,
    start: int | Tensor | None = None,
    key_mask: Tensor | None = None,
    key_lengths: Tensor | None = None,
) -> Tensor:
    """Return the ``n`` keys or blocks of each query with the best scores, as int32 ``[B, groups, Nq, n]``, best first.

    This is the indexer of models that were trained sparse. The score of query i and key j is the sum of
    ``weights[h, i] * (query[h, i] @ key[j])`` over the heads h of a group, in float32, or in float64 for such inputs.
    With ``relu``, products below 0 count as 0 (DeepSeek-V3.2, arXiv:2512.02556). A row with fewer than ``n`` keys ends
    in -1. At most 64 MiB are allocated beyond the inputs and the result, at any length. No gradient flows.

    Args:
        query: ``[B, H, Nq, D]``, any floating-point dtype.
        key: ``[B, 1 or groups, Nk, D]``, the query's dtype.
        n: Number of keys or blocks.
        weights: ``[B, H, Nq]``. None is 1.
        relu: Count negative products as 0.
        rounded: Round each query and key to 8 bits in units of its own, as DeepSeek's kernels do. A processor with
            AVX512-VNNI takes about a fourth of the time. It is for many queries: one takes as long as 32.
        groups: Number of groups of consecutive heads. The heads of a group choose together.
        block: Choose blocks of so many keys. The score of a block is the largest of its keys.
        local: Number of blocks, up to the query's own, that come first whatever their score. They need an allowed key.
        pattern: A rule of the keys to choose from, the same for all heads, such as ``Causal()``. None is all keys.
        start: Position of query 0 in the rule, by default ``Nk - Nq``, or ``[B, Nq]`` positions of all queries.
        key_mask: bool ``[B, Nk]``, True for keys to choose from.
        key_lengths: ``[B]`` integers, the number of valid keys of each batch element.

    Of equal scores, those are chosen that `torch.topk` on the row chooses, if it has at most 2**20 keys or blocks. NaNs
    come first. Raises ValueError if an argument does not match the others.

    >>> from ringtile.patterns import Causal
    >>> query, key = torch.tensor([[[[1.0], [-1.0]]]]), torch.tensor([[[[3.0], [5.0], [4.0]]]])
    >>> index_topk(query, key, 2, pattern=Causal()).tolist()
    [[[[1, 0], [0, 2]]]]
    """
    check_positive(n=n, block=block)
    query, key, rule, first = checked(query, key, weights, groups, pattern, start, key_mask, key_lengths)
    (batch, n_heads, n_queries, _), n_keys, device = query.shape, key.shape[2], query.device
    if type(local) is not int or local < 0:
        raise ValueError(f"local: expected an integer >= 0, got {local!r}")
    heads, dtype = n_heads // groups, torch.float64 if query.dtype == torch.float64 else torch.float32
    entries = -(-n_keys // block)
    out = torch.full((batch, groups, n_queries, n), -1, dtype=torch.int32, device=device)
    # A row holds its scores, and the best of two spans with their numbers. Tiles bound products, keys and masks.
    of_row = dtype.itemsize * min(entries, _SPAN) + 24 * min(n, entries)
    rows = max(1, min(256, _BYTES // max(of_row, 1), _BYTES // (dtype.itemsize * heads * block)))
    plain = all(is_real(x) for x in (query, key, weights) if x is not None) and device.type == "cpu"
    native = plain and dtype == torch.float32 and not torch.compiler.is_compiling() and not reason_against()
    of_tile, most = _CACHED if device.type == "cpu" else (rows * heads, _BYTES)
    if native and rounded:
        # The library keeps no products, and its strips have 32 queries.
        rows, products = rows // 32 * 32 or rows, 1
    else:
        rows = min(rows, of_tile // heads or 1)
        products = rows * heads
    of_key = max(products, 2 * query.shape[3])
    widest = min(min(most, _BYTES) // dtype.itemsize // of_key, min(2 * most, _BYTES) // 32 // rows)
    tile = max(1, min(widest, _SPAN) // block) * block
    # Tiles of rounded keys. PyTorch's topk needs more memory than the library's.
    known: dict[tuple[int, int, int], tuple[Tensor, Tensor, Tensor]] = {}
    most_known = _BYTES * (5 if native else 1) // 4 // (tile * (query.shape[3] + 12))
    room = torch.empty(min(rows, n_queries) * min(entries, _SPAN), dtype=dtype, device=device)
    zero, positions = torch.zeros((), dtype=torch.int64, device=device), torch.arange(n_queries, device=device)
    for b, g, begin in product(range(batch), range(groups), range(0, n_queries, rows)):
        chosen = slice(begin, min(begin + rows, n_queries))
        of_group = slice(g * heads, (g + 1) * heads)
        q = query[b, of_group, chosen].transpose(0, 1).to(dtype)
        w = None if weights is None else weights[b, of_group, chosen].T.to(dtype)
        if rounded:
            q, unit, _ = _round(q)
            w = (unit if w is None else w * unit).to(dtype)
        at = first[b, chosen, None] if isinstance(first, Tensor) else positions[chosen, None] + first
        best: tuple[Tensor, Tensor] | None = None
        for low in range(0, entries, _SPAN):
            high = min(low + _SPAN, entries)
            row = room[: len(q) * (high - low)].view(len(q), -1).fill_(-torch.inf)
            for left in range(low * block, min(high * block, n_keys), tile):
                right = min(left + tile, high * block, n_keys)
                j = torch.arange(left, right, device=device)
                keep = rule.batch_row(b).allowed(zero, at, j)
                keep = keep if key_mask is None else keep & key_mask[b, left:right]
                keep = keep if key_lengths is None else keep & (j < key_lengths[b])
                if kept := int(keep.count_nonzero()):
                    k, place = key[b, g % key.shape[1], left:right], (b, g % key.shape[1], left)
                    if rounded and place not in known:
                        if len(known) >= most_known:
                            known.clear()
                        known[place] = _round(k)
                    if rounded and native and w is not None:
                        scores = ranks.rounded_scores(q, w, *known[place], relu)
                    elif rounded:
                        numbers, unit, _ = known[place]
                        scores = scored(q.to(dtype), numbers.to(dtype), w, relu) * unit
                    else:
                        scores = scored(q, k.to(dtype), w, relu)
                    if kept < keep.numel():
                        scores.masked_fill_(~keep, -torch.inf)
                    if block > 1:
                        scores = pad(scores, (0, -len(j) % block), value=-torch.inf).unflatten(1, (-1, block)).amax(2)
                    row[:, left // block - low : -(-right // block) - low] = scores
            if local:
                lag = at // block - torch.arange(low, high, device=device)
                row.masked_fill_((lag >= 0) & (lag < local) & (row > -torch.inf), torch.inf)
            values, where = _best(row, min(n, high - low), native)
            where += low
            if best is not None:
                values, where = torch.cat([best[0], values], 1), torch.cat([best[1], where], 1)
                values, order = _best(values, min(n, values.shape[1]), native)
                where = where.gather(1, order.long().clamp_(min=0))
            best = values, where
        if best is not None:
            out[b, g, chosen, : best[1].shape[1]] = best[1].masked_fill_(best[0] == -torch.inf, -1)
    return out


def checked(
    query: Tensor,
    key: Tensor,
    weights: Tensor | None,
    groups: int,
    pattern: Pattern | str | None,
    start: int | Tensor | None,
    key_mask: Tensor | None,
    key_lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor, Pattern, int | Tensor]:
    """Return the arguments of an indexer: queries, keys, the rule, and the position of query 0 or of all queries."""
    check_positive(groups=groups)
    query, key, _ = checked_tensors(query, key, key, enable_gqa=True)
    check_options(query, key, key_mask=key_mask, key_lengths=key_lengths)
    (batch, n_heads, n_queries, _), n_keys = query.shape, key.shape[2]
    rule = Dense() if pattern is None else as_rule(pattern)
    if n_heads % groups or key.shape[1] not in (1, groups):
        raise ValueError(
            "groups: expected a divisor of the query's heads, and one key head or as many as groups, got "
            f"{groups=} with {query.shape=}, {key.shape=}"
        )
    if weights is not None:
        check_plain("weights", weights)
        if weights.shape != query.shape[:3] or not weights.is_floating_point():
            expected = tuple(query.shape[:3])
            raise ValueError(f"weights: expected floating {expected}, got {weights.dtype=}, {weights.shape=}")
    if rule.num_heads is not None or rule.batch_size not in (None, batch):
        raise ValueError(f"pattern: expected a Pattern of all heads and of {batch} batch elements, got {pattern!r}")
    first: int | Tensor = n_keys - n_queries if start is None else start
    each = isinstance(first, Tensor) and first.dtype in (torch.int32, torch.int64) and first.shape == (batch, n_queries)
    if type(first) is not int and not each:
        got = f"{first.dtype=}, {first.shape=}" if isinstance(first, Tensor) else repr(start)
        raise ValueError(f"start: expected an int or integers {(batch, n_queries)}, got {got}")
    return query, key, rule, first


def scored(q: Tensor, k: Tensor, weights: Tensor | None, relu: bool) -> Tensor:
    """Return the scores ``[rows, keys]`` of queries ``[rows, heads, D]``."""
    # Ranks need more digits than autocast keeps.
    with torch.autocast(q.device.type, enabled=False):
        products = (q.flatten(0, 1) @ k.mT).unflatten(0, q.shape[:2])
        if relu:
            products.relu_()
        return products.sum(1) if weights is None else torch.bmm(weights.unsqueeze(1), products).squeeze(1)


def _round(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return int8 numbers, padded to whole words of four, the unit of each vector, and the sum of its numbers."""
    numbers, unit = in_bytes(x.contiguous())
    numbers = pad(numbers, (0, -numbers.shape[-1] % 4))
    return numbers, unit.squeeze(-1), numbers.sum(-1, dtype=torch.int32)


def _best(scores: Tensor, n: int, native: bool) -> tuple[Tensor, Tensor]:
    """Return the best of each row and their numbers, those of -inf any."""
    if not native:
        values, where = scores.topk(n)
        return values, where
    # One more tells if a choice ends between equal scores. Then topk says which are chosen, as a model's own code does.
    values, where = ranks.best(scores, n + 1)
    tied = (values[:, n] > -torch.inf) & (values[:, n] == values[:, n - 1]) | values[:, n].isnan()
    if tied.any():
        again = scores[tied].topk(n)
        values[tied, :n], where[tied, :n] = again.values, again.indices.int()
    return values[:, :n], where[:, :n]
