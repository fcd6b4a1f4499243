"""Attention as its documentation says: dense masked softmax in float64, which shares no code with the library.

It reads the fields of patterns and biases, and has a rule for each of them, its own Philox and its own softmax. So
what a row without pairs, a score of -inf or a NaN gives is written here once:

* A row without pairs, or whose scores are all -inf, returns 0 and an lse of -inf. Its gradients are 0.
* A pair with a score of -inf has a weight of 0. A row with a score of NaN returns NaN.
* A key or value that no query of its head keeps takes no part, whatever it holds.
"""

import math
from collections.abc import Sequence
from functools import cache, partial
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from ringtile.functional.bias import Bias, ByKey, ByQuery, Grid, Relative
from ringtile.patterns.base import And, Dense, Not, Or, Pattern
from ringtile.patterns.blocks import Blocks, Elements, SampledBlocks
from ringtile.patterns.chosen import Chosen
from ringtile.patterns.documents import Documents
from ringtile.patterns.functions import FlexRule
from ringtile.patterns.local import Causal, GlobalTokens, Segments, Strided, Window
from ringtile.patterns.neighborhood import Neighborhood
from ringtile.patterns.offsets import BlockDilated, Dilated
from ringtile.patterns.random import RandomBlocks
from ringtile.patterns.wrapped import PerDocument, PerHead

_count = partial(torch.arange, dtype=torch.int64, device="cpu")
_number = partial(torch.tensor, dtype=torch.int64, device="cpu")
_ALL = torch.ones(1, 1, dtype=torch.bool, device="cpu")

Rule = Pattern | Tensor
"""A pattern, or the kept pairs themselves: bool that broadcasts to ``[B, H, Nq, Nk]``."""


class Cells(NamedTuple):
    """The numbers of the pairs that a rule is asked for."""

    batch: int
    head: int
    heads: int
    query: Tensor
    """Positions ``[Nq, 1]``."""
    key: Tensor
    """Positions ``[1, Nk]``."""
    start: int
    """Position of the call's first query, whose list is the first of `Chosen`."""


def kept_pairs(
    rule: Rule,
    batch: int,
    heads: int,
    n_queries: int,
    n_keys: int,
    *,
    start: int,
    is_causal: bool = False,
    key_mask: Tensor | None = None,
    key_lengths: Tensor | None = None,
) -> Tensor:
    """Return the pairs that a call keeps, bool ``[B, H, Nq, Nk]``, from the documentation of its rule and options."""
    i, j = _count(start, start + n_queries).unsqueeze(1), _count(n_keys).unsqueeze(0)
    pairs = torch.zeros(batch, heads, n_queries, n_keys, dtype=torch.bool, device="cpu")
    if isinstance(rule, Tensor):
        pairs = rule.expand_as(pairs)
    else:
        for b, h in product(range(batch), range(heads)):
            pairs[b, h] = _keeps(rule, Cells(b, h, heads, i, j, start))
    if is_causal:
        pairs = pairs & (j <= i)
    if key_mask is not None:
        pairs = pairs & key_mask[:, None, None]
    if key_lengths is not None:
        pairs = pairs & (j < key_lengths[:, None])[:, None, None]
    return pairs


def _keeps(rule: Pattern, at: Cells) -> Tensor:
    """Return the pairs that a rule keeps, bool that broadcasts to ``[Nq, Nk]``."""
    i, j = at.query, at.key
    match rule:
        case And(first=first, second=second):
            return _keeps(first, at) & _keeps(second, at)
        case Or(first=first, second=second):
            return _keeps(first, at) | _keeps(second, at)
        case Not(inner=inner):
            return ~_keeps(inner, at)
        case PerHead(patterns=patterns):
            return _keeps(patterns[at.head], at)
        case PerDocument(inner=inner, documents=documents):
            begins = _begins(documents, at.batch)
            own, other = (begins[torch.bucketize(x, begins, right=True) - 1] for x in (i, j))
            # Each query has the begin of its document, and the pattern counts from there.
            rows = [_keeps(inner, at._replace(query=i[n : n + 1] - own[n], key=j - own[n])) for n in range(len(i))]
            return torch.cat([row.expand(1, j.shape[1]) for row in rows] or [own == other]) & (own == other)
        case Dense():
            return _ALL
        case Causal():
            return j <= i
        case Window(left=left, right=right):
            return (i - left <= j) & (j <= i + (left if right is None else right))
        case Strided(stride=stride):
            return ((i - j).abs() < stride) | ((i - j) % stride == 0)
        case GlobalTokens(tokens=int(tokens)):
            return (i < tokens) | (j < tokens)
        case GlobalTokens(tokens=tokens):
            return torch.isin(i, _number(tokens)) | torch.isin(j, _number(tokens))
        case Segments(length=length, dilation=dilation, shift=shift):
            chosen = [x % length % dilation == (shift + at.head) % dilation for x in (i, j)]
            return (i // length == j // length) & chosen[0] & chosen[1]
        case Dilated(rates=rates, window=window):
            return _dilated(i - j, rates, window)
        case BlockDilated(rates=rates, reach=reach, block=block):
            return _dilated(i // block - j // block, rates, reach)
        case Blocks():
            n_rows, n_cols, n_heads = rule.shape
            marked = torch.zeros(n_heads or 1, n_rows, n_cols, dtype=torch.bool, device="cpu")
            marked.view(-1)[rule.codes.tensor.cpu()] = True
            return marked[0 if n_heads is None else at.head][
                i // rule.block, (j // rule.block).clamp(max=n_cols - 1)
            ] & (j // rule.block < n_cols)
        case RandomBlocks(per_row=per_row, seed=seed, block=block):
            row, col = i // block, j // block
            larger, smaller = torch.maximum(row, col), torch.minimum(row, col)
            most = int(larger.max()) + 1 if larger.numel() else 0
            drawn = torch.zeros(most, most, dtype=torch.bool, device="cpu")
            for number in range(most):
                drawn[number, _drawn(seed, at.head, number, per_row)] = True
            return drawn[larger.clamp(min=0), smaller.clamp(min=0)] & (smaller >= 0)
        case SampledBlocks():
            segments, blocks = [x // rule.segment for x in (i, j)], j // rule.block
            elsewhere = (segments[0] != segments[1]) & ((segments[0] - blocks) % rule.of < rule.keep)
            return elsewhere & (i // rule.within == j // rule.within) if rule.within else elsewhere
        case Elements(fn=FlexRule(mask_mod=mask_mod)):
            of_head = partial(mask_mod, _number(at.batch), _number(at.head))
            if not i.numel() or not j.numel():
                return _ALL
            return torch.vmap(torch.vmap(of_head, (None, 0)), (0, None))(i.flatten(), j.flatten())
        case Elements(fn=fn):
            pairs: Tensor = fn(_number(at.head), i, j)
            return pairs
        case Chosen(indices=indices, block=block):
            lists = indices[at.batch if len(indices) > 1 else 0, at.head * indices.shape[1] // at.heads]
            entries = lists[i.flatten() - at.start].unsqueeze(2)
            return ((entries >= 0) & (entries == j // block)).any(1)
        case Documents():
            begins = _begins(rule, at.batch)
            return torch.bucketize(i, begins, right=True) == torch.bucketize(j, begins, right=True)
        case Neighborhood():
            return _neighbors(rule, i, j)
    raise NotImplementedError(f"the oracle has no reading of {type(rule).__name__}")


def _dilated(offset: Tensor, rates: Sequence[int], reach: int) -> Tensor:
    pairs = torch.zeros_like(offset, dtype=torch.bool)
    for rate in rates:
        pairs |= (offset % rate == 0) & (offset.abs() <= reach * rate)
    return pairs


def _begins(documents: Documents, batch: int) -> Tensor:
    bounds = documents.bounds.tensor.cpu()[batch if documents.batched else 0]
    begins: Tensor = torch.unique(bounds)[:-1]
    return begins


def _neighbors(rule: Neighborhood, i: Tensor, j: Tensor) -> Tensor:
    numbers = _count(math.prod(rule.size)) if rule.tile is None else rule.order()
    pairs = _ALL
    coordinates = [torch.unravel_index(numbers[x], tuple(rule.size)) for x in (i, j)]
    for axis in range(len(rule.size)):
        length, window = rule.size[axis], _of_axis(rule.window, axis)
        dilation, stride = _of_axis(rule.dilation, axis), _of_axis(rule.stride, axis)
        causal = bool(_of_axis(rule.causal, axis))
        of_query = torch.zeros(length, length, dtype=torch.bool, device="cpu")
        for coordinate in range(length):
            # All tokens of a phase are neighbors of each other, and stride ones share the window of one of them.
            line = list(range(coordinate % dilation, length, dilation))
            step = coordinate // dilation
            leader = step // stride * stride + (stride - 1 if causal else stride // 2)
            leader = min(leader, len(line) - 1)
            first = leader - window + 1 if causal else min(max(leader - window // 2, 0), len(line) - window)
            last = step if causal else first + window - 1
            of_query[coordinate, line[max(first, 0) : last + 1]] = True
        pairs = pairs & of_query[coordinates[0][axis], coordinates[1][axis]]
    return pairs


def _of_axis(numbers: Sequence[int] | int, axis: int) -> int:
    return numbers if isinstance(numbers, int) else numbers[axis]


def _philox(counter: Sequence[Tensor], key: tuple[int, int], rounds: int) -> list[Tensor]:
    """Return the four words of Philox4x32 (Salmon et al., SC 2011) for int64 counters that broadcast."""
    word = 0xFFFFFFFF
    c = [x & word for x in counter]
    k = list(key)
    for _ in range(rounds):
        halves = []
        for x, factor in ((c[0], 0xD2511F53), (c[2], 0xCD9E8D57)):
            # Two halves of 16 bits, since a product of 64 bits does not fit.
            low, high = x * (factor & 0xFFFF), x * (factor >> 16)
            total = high + (low >> 16)
            halves.append((total >> 16, ((total & 0xFFFF) << 16) | (low & 0xFFFF)))
        (high0, low0), (high1, low1) = halves
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
        k = [(k[0] + 0x9E3779B9) & word, (k[1] + 0xBB67AE85) & word]
    return c


@cache
def _drawn(seed: int, head: int, number: int, per_row: int) -> list[int]:
    """Return the blocks that a block draws: the first of a shuffle of itself and those before it."""
    order = list(range(number + 1))
    for step in range(min(per_row, number + 1)):
        counter = [_number(x) for x in (step // 4, number, head, number >> 32)]
        words = _philox(counter, (seed & 0xFFFFFFFF, seed >> 32), 10)
        other = step + (int(words[step % 4]) * (number + 1 - step) >> 32)
        order[step], order[other] = order[other], order[step]
    return order[:per_row]


def dropout_keeps(
    p: float, seed: int, batch: Tensor, head: Tensor, n_queries: int, n_keys: int, start: int = 0
) -> tuple[Tensor, float]:
    """Return the weights that dropout keeps, bool ``[B, H, Nq, Nk]``, and the factor of those."""
    threshold = round(65536 * p)
    b, h = batch.view(-1, 1, 1, 1), head.view(1, -1, 1, 1)
    i, j = _count(start, start + n_queries).view(1, 1, -1, 1), _count(n_keys).view(1, 1, 1, -1)
    words = _philox((j // 32 * 4 + j // 2 % 4, i, h, b), (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF), 7)
    words = list(torch.broadcast_tensors(*words))
    word = torch.stack(words).gather(0, (j // 8 % 4).expand(words[0].shape).unsqueeze(0))[0]
    return (word >> 16 * (j % 2)) & 0xFFFF >= threshold, 65536 / (65536 - threshold)


def _bias_of(bias: Bias, i: Tensor, j: Tensor, heads: int, scale: float) -> Tensor:
    """Return what a bias adds to the scores, ``[B or 1, H or 1, Nq, Nk]``."""
    table = bias.table.double()
    if isinstance(bias, Grid):
        shape = tuple(bias.shape)
        coordinates = [torch.unravel_index(x, shape) for x in (i, j)]
        index = [b - a + size - 1 for a, b, size in zip(*coordinates, shape, strict=True)]
        return table[:, *index].unsqueeze(0)
    coordinate = (j - i + bias.offset).clamp(0, table.shape[1] - 1)
    if isinstance(bias, Relative):
        return table[:, coordinate].unsqueeze(0)
    if isinstance(bias, ByQuery):
        vectors = torch.einsum("bhqd,hqkd->bhqk", bias.query.double(), table[:, coordinate].expand(heads, -1, -1, -1))
    else:
        assert isinstance(bias, ByKey)
        keys = bias.key.double().repeat_interleave(heads // bias.key.shape[1], 1)
        vectors = torch.einsum("bhkd,hqkd->bhqk", keys, table[:, coordinate].expand(heads, -1, -1, -1))
    return scale * vectors


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rule: Rule,
    *,
    is_causal: bool = False,
    key_mask: Tensor | None = None,
    key_lengths: Tensor | None = None,
    start: int | None = None,
    dropout_p: float = 0.0,
    seed: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    head_at: Tensor | None = None,
    batch_at: Tensor | None = None,
    bias: Bias | tuple[Bias, ...] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the output ``[B, H, Nq, Dv]`` and the lse ``[B, H, Nq]`` in float64, with gradients by autograd.

    The arguments are those of `ringtile.sparse_attention`. ``seed`` is an int.

    Example:
        >>> q, k, v = torch.randn(3, 1, 2, 4, 8).unbind()
        >>> out, lse = attention(q, k, v, Causal() & Window(1))
        >>> out.dtype, lse.shape
        (torch.float64, torch.Size([1, 2, 4]))
    """
    (batch, heads, n_queries, _), n_keys = query.shape, key.shape[2]
    start = n_keys - n_queries if start is None else start
    scale = query.shape[3] ** -0.5 if scale is None else scale
    i, j = _count(start, start + n_queries).unsqueeze(1), _count(n_keys).unsqueeze(0)
    pairs = kept_pairs(
        rule,
        batch,
        heads,
        n_queries,
        n_keys,
        start=start,
        is_causal=is_causal,
        key_mask=key_mask,
        key_lengths=key_lengths,
    )
    shared = heads // max(key.shape[1], 1)
    q, k, v = query.double(), key.double(), value.double()
    k, v = (x.repeat_interleave(shared, 1) for x in (k, v))
    read = pairs.any(2).unsqueeze(3)
    k, v = (torch.where(read, x, 0) for x in (k, v))
    # An empty row takes no part either.
    scores = torch.where(pairs.any(3, keepdim=True), q, 0) @ k.mT * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.double()[:, None, None] * (i - j).abs()
    for term in () if bias is None else bias if isinstance(bias, tuple) else (bias,):
        scores = scores + _bias_of(term, i, j, heads, scale)
    scores = torch.where(pairs, scores, -math.inf)
    empty = (scores == -math.inf).all(3)
    # Zeros in coordinate of empty rows, so that autograd makes no NaN of them.
    scores = torch.where(empty.unsqueeze(3), 0, scores)
    lse = torch.logsumexp(scores, 3) if n_keys else scores.sum(3)
    total = lse if sinks is None else torch.logaddexp(lse, sinks.double()[:, None].expand_as(lse))
    weights = torch.where(empty.unsqueeze(3), 0, torch.exp(scores - total.unsqueeze(3)))
    if dropout_p:
        batches = _count(batch) if batch_at is None else batch_at
        numbers = _count(heads) if head_at is None else head_at
        survivors, factor = dropout_keeps(dropout_p, seed, batches, numbers, n_queries, n_keys, start)
        weights = weights * survivors * factor
    return weights @ v, torch.where(empty, -math.inf, lse)
