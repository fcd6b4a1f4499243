"""Each row of docs/from-other-libraries.md: both columns run, and give the same outputs and gradients.

torch's own functions are called. The other libraries need a GPU, so their calls are defined here in their own words,
as one dense softmax, with their own arguments and layouts.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import relative_error
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention

PAGE = (Path(__file__).parents[2] / "docs/from-other-libraries.md").read_text(encoding="utf-8")
HEADS, DIM = 4, 8
EXACT = 1e-12
SHORT, SAME, LONG = (70, 200), (200, 200), (200, 150)
"""Numbers of queries and keys."""

Row = tuple[str, str]
"""The heading of a row's first column, and its first cell."""


def rows_of(page: str) -> dict[Row, str]:
    """Our arguments for each row of the tables of a page."""
    rows, heading = {}, ""
    for line in page.splitlines():
        cells = [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) != 3 or set(line) <= set("|-"):
            continue
        if not cells[0].startswith("`") or cells[1].startswith("`sparse_attention("):
            heading = cells[0].strip("`")
            continue
        theirs, ours = (re.fullmatch(r"`([^`]+)`", cell) for cell in cells[:2])
        assert theirs is not None, f"not one piece of code: {cells[0]}"
        assert ours is not None, f"not one piece of code: {cells[1]}"
        assert (heading, theirs[1]) not in rows, f"twice: {theirs[1]}"
        rows[heading, theirs[1]] = ours[1]
    return rows


ROWS = rows_of(PAGE)


def scores_of(q: Tensor, k: Tensor, scale: float | None = None) -> Tensor:
    return q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)


def weigh(scores: Tensor, kept: Tensor, v: Tensor) -> Tensor:
    """The definition: one softmax per query, zeros if it keeps nothing."""
    return scores.masked_fill(~kept, -torch.inf).softmax(-1).nan_to_num(0.0) @ v


def ends_aligned(n_queries: int, n_keys: int) -> Tensor:
    """j - i, with the last query at the last key."""
    return torch.arange(n_keys) - torch.arange(n_keys - n_queries, n_keys)[:, None]


def starts_aligned(n_queries: int, n_keys: int) -> Tensor:
    """j - i, with the first query at the first key."""
    return torch.arange(n_keys) - torch.arange(n_queries)[:, None]


def heads_first(*tensors: Tensor) -> list[Tensor]:
    return [x.transpose(1, 2) for x in tensors]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    learnable_sink: Tensor | None = None,
) -> Tensor:
    """flash-attn 2 and 4: the last query is at the last key, and a side of -1 has no limit."""
    assert not dropout_p
    q, k, v = heads_first(q, k, v)
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    ahead = ends_aligned(q.shape[2], k.shape[2])
    left, right = (window_size[0], 0) if causal else window_size
    scores = scores_of(q, k, softmax_scale)
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi_slopes is not None:
        scores = scores - alibi_slopes[:, None, None] * ahead.abs()
    kept = torch.ones_like(ahead, dtype=torch.bool)
    if left >= 0:
        kept &= ahead >= -left
    if right >= 0:
        kept &= ahead <= right
    if learnable_sink is not None:
        # One more key for each query, whose value is zero.
        scores = torch.cat([scores, learnable_sink[:, None, None].expand(*scores.shape[:3], 1)], -1)
        kept, v = F.pad(kept, (0, 1), value=True), F.pad(v, (0, 0, 0, 1))
    return weigh(scores, kept, v).transpose(1, 2)


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, **how: Any
) -> Tensor:
    """flash-attn 2 over each document alone, `[T, H, D]`."""
    assert max_q == cu_q.diff().max()
    assert max_k == cu_k.diff().max()
    parts = zip(q.tensor_split(cu_q[1:-1]), k.tensor_split(cu_k[1:-1]), v.tensor_split(cu_k[1:-1]), strict=True)
    return torch.cat([flash_attn_func(*(x[None] for x in part), **how)[0] for part in parts])


varlen_attn = flash_attn_varlen_func


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: int | Tensor,
    cache_leftpad: Tensor | None = None,
    **how: Any,
) -> Tensor:
    """flash-attn 2 over the used slots of each batch element."""
    batch = len(q)
    ends = [cache_seqlens] * batch if isinstance(cache_seqlens, int) else cache_seqlens.tolist()
    begins = [0] * batch if cache_leftpad is None else cache_leftpad.tolist()
    outs = []
    for b, begin, end in zip(range(batch), begins, ends, strict=True):
        used = (x[b : b + 1, begin:end] for x in (k_cache, v_cache))
        outs.append(flash_attn_func(q[b : b + 1], *used, **how))
    return torch.cat(outs)


def LowerTriangularMask() -> Callable[[int, int], Tensor]:
    return lambda n_queries, n_keys: starts_aligned(n_queries, n_keys) <= 0


def LowerTriangularFromBottomRightMask() -> Callable[[int, int], Tensor]:
    return lambda n_queries, n_keys: ends_aligned(n_queries, n_keys) <= 0


def LowerTriangularFromBottomRightLocalAttentionMask(window_size: int) -> Callable[[int, int], Tensor]:
    return LocalAttentionFromBottomRightMask(window_size - 1, 0)


def LocalAttentionFromBottomRightMask(window_left: int, window_right: int) -> Callable[[int, int], Tensor]:
    def kept(n_queries: int, n_keys: int) -> Tensor:
        ahead = ends_aligned(n_queries, n_keys)
        return (ahead >= -window_left) & (ahead <= window_right)

    return kept


class BlockDiagonalMask:
    """xformers: documents of given lengths, by default without causality inside."""

    def __init__(self, lengths: list[int], window: int | None = None) -> None:
        self.lengths, self.window = lengths, window

    @classmethod
    def from_seqlens(cls, lengths: list[int]) -> BlockDiagonalMask:
        return cls(lengths)

    def make_local_attention(self, window_size: int) -> BlockDiagonalMask:
        return type(self)(self.lengths, window_size)

    def of_document(self, length: int) -> Tensor:
        return torch.ones(length, length, dtype=torch.bool)

    def __call__(self, n_queries: int, n_keys: int) -> Tensor:
        assert n_queries == n_keys == sum(self.lengths)
        return torch.block_diag(*map(self.of_document, self.lengths)).bool()


class BlockDiagonalCausalMask(BlockDiagonalMask):
    def of_document(self, length: int) -> Tensor:
        kept = super().of_document(length).tril()
        return kept if self.window is None else kept.triu(1 - self.window)


def memory_efficient_attention(q: Tensor, k: Tensor, v: Tensor, attn_bias: Callable[[int, int], Tensor]) -> Tensor:
    q, k, v = heads_first(q, k, v)
    return weigh(scores_of(q, k), attn_bias(q.shape[2], k.shape[2]), v).transpose(1, 2)


def neighbors(n_tokens: int, kernel_size: int, dilation: int, stride: int, is_causal: bool) -> Tensor:
    """The keys of each query of one axis of NATTEN, listed one by one: bool ``[N, N]``."""
    kept = torch.zeros(n_tokens, n_tokens, dtype=torch.bool)
    for group in range(dilation):
        tokens = list(range(group, n_tokens, dilation))
        for place, query in enumerate(tokens):
            leader = place // stride * stride + (stride - 1 if is_causal else stride // 2)
            leader = min(leader, len(tokens) - 1)
            begin = leader - kernel_size + 1 if is_causal else leader - kernel_size // 2
            if not is_causal:
                begin = min(begin, len(tokens) - kernel_size)
            end = place + 1 if is_causal else max(begin, 0) + kernel_size
            kept[query, tokens[max(begin, 0) : end]] = True
    return kept


def _natten(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grid: tuple[int, ...],
    kernel_size: Any,
    stride: Any = 1,
    dilation: Any = 1,
    is_causal: Any = False,
    rpb: Tensor | None = None,
) -> Tensor:
    """NATTEN's call on a grid of tokens. Its tensors are ``[B, h, w, H, D]``. Here they are flat."""
    q, k, v = heads_first(q, k, v)
    scores = scores_of(q, k)
    if rpb is not None:
        at = torch.stack(torch.meshgrid(*map(torch.arange, grid), indexing="ij")).flatten(1)
        farthest = (torch.tensor(rpb.shape[1:]) // 2).view(-1, 1, 1)
        apart = (at[:, None] - at[:, :, None]).clamp(-farthest, farthest) + farthest
        scores = scores + torch.stack([numbers[tuple(apart)] for numbers in rpb])
    given = (
        each if isinstance(each, tuple) else (each,) * len(grid) for each in (kernel_size, dilation, stride, is_causal)
    )
    kept = torch.ones(1, 1, dtype=torch.int64)
    for n_tokens, *numbers in zip(grid, *given, strict=True):
        kept = torch.kron(kept, neighbors(n_tokens, *numbers).long())
    return weigh(scores, kept.bool(), v).transpose(1, 2)


def na1d(q: Tensor, k: Tensor, v: Tensor, *given: Any, **named: Any) -> Tensor:
    return _natten(q, k, v, (q.shape[1],), *given, **named)


def na2d(q: Tensor, k: Tensor, v: Tensor, *given: Any, **named: Any) -> Tensor:
    return _natten(q, k, v, (10, q.shape[1] // 10), *given, **named)


def na3d(q: Tensor, k: Tensor, v: Tensor, *given: Any, **named: Any) -> Tensor:
    return _natten(q, k, v, (4, 5, q.shape[1] // 20), *given, **named)


def flex(q: Tensor, k: Tensor, v: Tensor, cell: str, names: dict[str, Any], is_mask: bool, call: bool) -> Tensor:
    """The rule dense, because FlexAttention has no backward pass on a CPU. `call` it too, which takes a trace."""
    arguments = "b, h, q_idx, kv_idx" if is_mask else "score, b, h, q_idx, kv_idx"
    function = eval(f"lambda {arguments}: {cell}", names)
    sizes = (*q.shape[:3], k.shape[2])
    how: dict[str, Any] = {"score_mod": function}
    if is_mask:
        out = weigh(scores_of(q, k), create_mask(function, *sizes, device="cpu"), v)
        how = {"block_mask": create_block_mask(function, *sizes, device="cpu")} if call else {}
    else:
        at = [torch.arange(size).view([-1 if dim == own else 1 for own in range(4)]) for dim, size in enumerate(sizes)]
        out = weigh(function(scores_of(q, k), *at), torch.ones(1, dtype=torch.bool), v)
    if call:
        assert relative_error(out, flex_attention(q.detach(), k.detach(), v.detach(), **how)) < EXACT
    return out


def rule(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Somebody's mask_mod: another stride in each head."""
    return (q_idx - kv_idx) % (h + 2) == 0


def document_lengths(n_tokens: int) -> list[int]:
    lengths = [n_tokens * 3 // 10, 1, n_tokens * 9 // 20]
    return [*lengths, n_tokens - sum(lengths)]


def variables(n_queries: int, n_keys: int) -> dict[str, Any]:
    """The names that the page uses, beside the tensors."""
    of_queries, of_keys = torch.tensor(document_lengths(n_queries)), torch.tensor(document_lengths(n_keys))
    ids = torch.repeat_interleave(of_keys)
    return {
        "F": F,
        "torch": torch,
        "n_queries": n_queries,
        "n_keys": n_keys,
        "height": 10,
        "width": n_keys // 10,
        "frames": 4,
        "rows": 5,
        "columns": n_keys // 20,
        "positions": torch.arange(n_keys),
        "mask": torch.rand(2, HEADS, n_queries, n_keys) < 0.3,
        "bias": torch.zeros(n_queries, n_keys, dtype=torch.float64).masked_fill_(
            torch.rand(n_queries, n_keys) < 0.7, -torch.inf
        ),
        "padding": torch.arange(n_keys) < torch.tensor([n_keys, n_keys - 30])[:, None],
        "slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.float64),
        "distance": ends_aligned(n_queries, n_keys).abs(),
        "numbers": torch.randn(HEADS, 23, dtype=torch.float64),
        "places": (ends_aligned(n_queries, n_keys) + 11).clamp(0, 22),
        "n": max(n_queries, n_keys),
        "table": torch.randn(HEADS, 2 * max(n_queries, n_keys) - 1, dtype=torch.float64),
        "offsets": torch.randn(HEADS, 13, 13, dtype=torch.float64),
        "steps": torch.randn(HEADS, 5, 5, 9, dtype=torch.float64),
        "sink": torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64),
        "window": 20,
        "left": 20,
        "right": 9,
        "sinks": 4,
        "prefix": 50,
        "prefixes": torch.tensor([50, 3]),
        "rate": 3,
        "cap": 0.7,
        "document": ids,
        "of_row": torch.stack([ids, ids.flip(0)]),
        "cu_q": F.pad(of_queries.cumsum(0), (1, 0)),
        "cu_k": F.pad(of_keys.cumsum(0), (1, 0)),
        "max_q": int(of_queries.max()),
        "max_k": int(of_keys.max()),
        "length": 170,
        "lengths": torch.tensor([170, 93]),
        "pad": torch.tensor([0, 17]),
        "size": 12,
        "rule": rule,
        "causal_lower_right": causal_lower_right,
        "causal_upper_left": causal_upper_left,
    }


EVERY = (SHORT, LONG)
FEW, ONE = (5, 200), (1, 200)
SIZES: dict[str, tuple[tuple[int, int], ...]] = {
    "F.scaled_dot_product_attention(q, k, v, attn_mask=causal_lower_right(n_queries, n_keys))": (SHORT, SAME),
    "F.scaled_dot_product_attention(q, k, v, dropout_p=0.25)": (),
    "(q_idx >= kv_idx) | (kv_idx < prefixes[b])": (SAME,),
    "document[q_idx] == document[kv_idx]": (SAME,),
    "(of_row[b, q_idx] == of_row[b, kv_idx]) & (q_idx >= kv_idx)": (SAME,),
    "flash_attn_varlen_func(q, k, v, cu_q, cu_k, max_q, max_k, causal=True)": EVERY,
    "flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=length, causal=True)": (FEW,),
    "flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=length, causal=True, window_size=(left, 0))": (FEW,),
    "flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths)": (ONE,),
    "flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths, window_size=(left, 0))": (ONE,),
    "flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths, causal=True)": (FEW,),
    "flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=length, cache_leftpad=pad, causal=True)": (FEW,),
}
"""The lengths that a row of the page is run at, if they are not those of all rows."""
SQUARE = re.compile("varlen|BlockDiagonal|na[123]d")
"""Rows with as many queries as keys."""


def sizes_of(row: str) -> tuple[tuple[int, int], ...]:
    return SIZES.get(row, (SAME,) if SQUARE.search(row) else EVERY)


GROUPED = {"F.scaled_dot_product_attention(q, k, v, enable_gqa=True)", "flash_attn_func(q, k, v)"}
CASES = [(heading, row, sizes) for heading, row in ROWS for sizes in sizes_of(row)]


def page_names() -> dict[str, Any]:
    """The imports and functions of the page."""
    names: dict[str, Any] = {}
    for body in re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S):
        exec(compile(body, "from-other-libraries.md", "exec"), names)
    return names


def their_result(heading: str, cell: str, names: dict[str, Any], tensors: list[Tensor]) -> Tensor:
    """The left column, whose tensors are laid out as in its library, as `[B, H, N, D]`."""
    if heading in ("mask_mod", "score_mod"):
        is_mask, row = heading == "mask_mod", [row for of, row in ROWS if of == heading].index(cell)
        first = (names["n_queries"], names["n_keys"]) == sizes_of(cell)[0]
        return flex(*tensors, cell, names, is_mask, call=first and (not is_mask or row < 2))
    if heading == "PyTorch":
        return eval(cell, {**names, **dict(zip("qkv", tensors, strict=True))})
    q, k, v = heads_first(*tensors)
    if heading == "attn_bias":
        return heads_first(memory_efficient_attention(q, k, v, eval(cell, {**globals(), **names})))[0]
    if "varlen" in cell:
        q, k, v = (x[0] for x in (q, k, v))
    given = {"q": q, "k": k, "v": v, "k_cache": k, "v_cache": v}
    out: Tensor = eval(cell, {**globals(), **names, **given})
    return (out[None] if "varlen" in cell else out).transpose(1, 2)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize(("heading", "row", "sizes"), CASES)
def test_a_row_is_the_same_attention(heading: str, row: str, sizes: tuple[int, int]) -> None:
    n_queries, n_keys = sizes
    names = {**variables(n_queries, n_keys), **page_names()}
    batch = 1 if "varlen" in row or heading == "attn_bias" else 2
    key_heads = 2 if row in GROUPED else HEADS
    if heading == "attn_bias":
        names["lengths"] = document_lengths(n_keys)
    q = torch.randn(batch, HEADS, n_queries, DIM, dtype=torch.float64, requires_grad=True)
    k, v = torch.randn(2, batch, key_heads, n_keys, DIM, dtype=torch.float64).requires_grad_().unbind()
    learned = [names[name].requires_grad_() for name in re.findall(r"rpb=(\w+)", row)]
    ours = eval(f"sparse_attention(q, k, v, {ROWS[heading, row]})", {**names, "q": q, "k": k, "v": v})
    theirs = their_result(heading, row, names, [q, k, v])
    assert relative_error(ours, theirs) < EXACT
    cotangent = torch.randn_like(ours)
    grads = [torch.autograd.grad(out, (q, k, v, *learned), cotangent) for out in (ours, theirs)]
    for mine, other in zip(*grads, strict=True):
        assert relative_error(mine, other) < EXACT


def test_dropout_drops_as_often_and_scales_the_rest() -> None:
    row = "F.scaled_dot_product_attention(q, k, v, dropout_p=0.25)"
    q, k = torch.randn(2, 2, HEADS, 64, DIM, dtype=torch.float64).unbind()
    # With the identity as values, the output is the weights.
    v = torch.eye(64, dtype=torch.float64).expand(2, HEADS, -1, -1)
    weights = scores_of(q, k).softmax(-1)
    for call in (row, f"sparse_attention(q, k, v, {ROWS['PyTorch', row]})"):
        left = eval(call, {**globals(), **page_names(), "q": q, "k": k, "v": v})
        kept = left != 0
        assert relative_error(left, weights / 0.75 * kept) < EXACT
        assert abs(kept.double().mean().item() - 0.75) < 5 * (0.25 * 0.75 / kept.numel()) ** 0.5


def test_the_page_has_the_rows_of_each_library() -> None:
    headings = [heading for heading, _ in ROWS]
    assert {heading: headings.count(heading) for heading in headings} == {
        "PyTorch": 12,
        "mask_mod": 10,
        "score_mod": 4,
        "flash-attn": 21,
        "attn_bias": 7,
        "NATTEN": 11,
    }


def test_the_masks_of_xformers_are_as_defined_here() -> None:
    biases = pytest.importorskip("xformers.ops.fmha.attn_bias", reason="xformers has no wheel for this platform")
    for cell in (row for heading, row in ROWS if heading == "attn_bias"):
        for n_queries, n_keys in sizes_of(cell):
            names = {"window": 20, "left": 20, "right": 9, "lengths": document_lengths(n_keys)}
            original = eval(cell, {**vars(biases), **names}).materialize((1, 1, n_queries, n_keys))
            assert torch.equal(original == 0, eval(cell, {**globals(), **names})(n_queries, n_keys)[None, None])
