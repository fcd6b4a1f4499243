"""Every kind of rule with every option: calls that move, cut or merge tokens keep the meaning of each option."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from oracle import relative_error
from processes import one_rank
from test_other_calls import neighbors
from torch import Tensor

from ringtile import build_index, in_slices, sparse_attention
from ringtile.distributed import Layout, ring_attention
from ringtile.functional import ByKey, ByQuery, Grid, Relative
from ringtile.kernels.philox import dropout_keep, dropout_scale
from ringtile.patterns import (
    Blocks,
    Causal,
    Chosen,
    Documents,
    Elements,
    GlobalTokens,
    Neighborhood,
    Pattern,
    Window,
    from_mask,
    per_head,
)

B, H, KEY_HEADS, N, D = 2, 2, 1, 140, 6


def positions(n: int = N) -> tuple[Tensor, Tensor]:
    return torch.arange(n)[:, None], torch.arange(n)


def grid_keep(size: tuple[int, ...], window: int, dilation: int) -> Tensor:
    kept = torch.ones(1, 1, dtype=torch.int64)
    for axis in size:
        kept = torch.kron(kept, neighbors(axis, window, dilation, 1, False).long())
    return kept.bool()


QUERY, KEY = positions()
LISTS = torch.randint(-1, N, (B, KEY_HEADS, N, 9), generator=torch.Generator().manual_seed(1))
LISTED = (LISTS.unsqueeze(3) == KEY.unsqueeze(1)).any(-1).repeat_interleave(H // KEY_HEADS, 1)
NEAR, PAST = (QUERY - KEY).abs() <= 5, KEY <= QUERY
IDS = torch.stack((torch.arange(N) // 20, torch.arange(N) // 33))
TILES = torch.tensor([[True, False], [True, True]])
MASK = torch.rand(B, 1, N, N, generator=torch.Generator().manual_seed(2)) < 0.1
MOVED = (16, 16)

RULES: dict[str, tuple[Pattern | Tensor, Tensor]] = {
    "window": (Causal() & Window(5), PAST & NEAR),
    "not and or": (~Window(5) | GlobalTokens(3), ~NEAR | (QUERY < 3) | (KEY < 3)),
    "heads": (per_head([Causal(), ~Window(5)]), torch.stack((PAST, ~NEAR))),
    "documents": (Documents(ids=IDS), (IDS[:, :, None] == IDS[:, None]).unsqueeze(1)),
    "tiles": (TILES, TILES[QUERY // 128, KEY // 128]),
    "blocks": (Blocks(TILES) & Causal(), TILES[QUERY // 128, KEY // 128] & PAST),
    "elements": (Elements(lambda h, i, j: (i + j) % 3 == h), torch.stack([(QUERY + KEY) % 3 == h for h in range(H)])),
    "mask": (from_mask(MASK), MASK),
    "lists": (Chosen(LISTS), LISTED),
    "lists and a window": (Causal() & (Window(5) | Chosen(LISTS)), PAST & (NEAR | LISTED)),
    "lists or a function": (
        Chosen(LISTS) | Elements(lambda h, i, j: (i + j) % 3 == 0),
        LISTED | ((QUERY + KEY) % 3 == 0),
    ),
    "neighborhood": (Neighborhood(MOVED, 2, 8), grid_keep(MOVED, 2, 8)),
    "neighborhood of three axes": (Neighborhood((8, 8, 4), 2, 2), grid_keep((8, 8, 4), 2, 2)),
    "causal neighborhood": (
        Causal() & Neighborhood(MOVED, 2, 8),
        grid_keep(MOVED, 2, 8) & torch.ones(256, 256, dtype=torch.bool).tril(),
    ),
}
"""Rules, and the pairs that they keep, bool ``[B or 1, H or 1, N, N]`` or a part of it."""


def options_of(n: int) -> dict[str, dict[str, Any]]:
    mask, lengths = torch.rand(B, n) < 0.7, torch.tensor([n // 2, n - 3])
    slopes, sinks = torch.rand(H).double() * 0.1, torch.randn(H).double()
    drop: dict[str, Any] = {"dropout_p": 0.3, "seed": 5}
    return {
        "no option": {},
        "key_mask": {"key_mask": mask},
        "key_lengths": {"key_lengths": lengths},
        "both": {"key_mask": mask, "key_lengths": lengths},
        "softcap and scale": {"softcap": 2.0, "scale": -0.7},
        "alibi": {"alibi_slopes": slopes, "key_lengths": lengths},
        "sinks": {"sinks": sinks, "softcap": 3.0, "key_lengths": lengths},
        "dropout": drop,
        "dropout of a part": {
            **drop,
            "head_at": torch.tensor([7, 1]),
            "batch_at": torch.tensor([4, 2], dtype=torch.int32),
            "key_lengths": lengths,
            "alibi_slopes": slopes,
            "sinks": sinks,
        },
        "start": {"start": 0, "key_lengths": lengths, **drop},
        "bias": {"bias": Relative(torch.randn(H, 99).double(), 40), "key_lengths": lengths, **drop},
        "bias of a grid": {"bias": Grid(torch.randn(1, 2 * n - 1).double(), (n,)), "key_mask": mask},
        "bias of queries and keys": {
            "bias": (
                ByQuery(torch.randn(B, H, n, 3).double(), torch.randn(H, 30, 3).double(), 9),
                ByKey(torch.randn(B, KEY_HEADS, n, 3).double(), torch.randn(1, 30, 3).double(), 9),
            ),
            "key_mask": mask,
            "key_lengths": lengths,
        },
    }


def bias_of(bias: Any, n: int, scale: float) -> Tensor:
    """Return the numbers of all pairs."""
    i, j = positions(n)
    if isinstance(bias, tuple):
        return sum((bias_of(each, n, scale) for each in bias), torch.zeros(()))
    offset = n - 1 if isinstance(bias, Grid) else bias.offset
    place = (j - i + offset).clamp(0, bias.table.shape[1] - 1)
    if isinstance(bias, Relative | Grid):
        return bias.table[:, place]
    rows = bias.query[:, :, :, None] if isinstance(bias, ByQuery) else bias.key.repeat_interleave(2, 1)[:, :, None]
    return scale * (rows * bias.table[:, place]).sum(-1)


def dense(q: Tensor, k: Tensor, v: Tensor, keep: Tensor, **o: Any) -> tuple[Tensor, Tensor]:
    """Masked softmax over a matrix of all pairs, in float64."""
    n, scale = q.shape[2], o.get("scale", D**-0.5)
    i, j = positions(n)
    k, v = (x.repeat_interleave(H // KEY_HEADS, 1) for x in (k, v))
    scores = q @ k.mT * scale
    if "softcap" in o:
        scores = o["softcap"] * torch.tanh(scores / o["softcap"])
    if "alibi_slopes" in o:
        scores = scores - o["alibi_slopes"][:, None, None] * (i - j).abs()
    if "bias" in o:
        scores = scores + bias_of(o["bias"], n, scale)
    if "key_mask" in o:
        keep = keep & o["key_mask"][:, None, None]
    if "key_lengths" in o:
        keep = keep & (j < o["key_lengths"][:, None])[:, None, None]
    scores = scores.masked_fill(~keep, -math.inf)
    lse = scores.logsumexp(3)
    total = torch.logaddexp(lse, o["sinks"][:, None]) if "sinks" in o else lse
    weights = (scores - total[..., None]).exp().masked_fill(~keep, 0)
    if "dropout_p" in o:
        batch, head = o.get("batch_at", torch.arange(B)).long(), o.get("head_at", torch.arange(H))
        drawn = dropout_keep(o["seed"], batch[:, None, None, None], head[:, None, None], i, j, o["dropout_p"])
        weights = weights * drawn * dropout_scale(o["dropout_p"])
    return weights @ v, lse


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    with one_rank():
        yield


def paths(n: int) -> dict[str, Callable[..., Any]]:
    ring = partial(ring_attention, layout=Layout.contiguous(n, 1))
    return {
        "default": sparse_attention,
        "blockwise": partial(sparse_attention, backend="blockwise"),
        "reference": partial(sparse_attention, backend="reference"),
        "slices": in_slices(3),
        "one rank": ring,
        "tiles of 16": lambda q, k, v, rule, **o: sparse_attention(
            q, k, v, build_index(rule, n, num_heads=H, batch=B, block=16), **o
        ),
    }


def refusal(name: str, option: str, path: str) -> str | None:
    """Return a word of the error of a call that a path does not compute, or None if it computes it."""
    if option == "start" and path == "one rank":
        return "start"
    if name == "lists or a function" and path != "reference":
        # Two query heads share a key head, and a function can differ by head.
        return "repeat the keys and values|got Chosen|bias|start"
    if name.startswith("lists") and path in ("slices", "tiles of 16"):
        return "bias|got Chosen"
    if option.startswith("bias") and (path in ("slices", "one rank") or name.startswith("lists")):
        return "bias"
    return "got Tensor" if (name, path) == ("tiles", "tiles of 16") else None


@pytest.mark.parametrize("name", RULES)
def test_every_option_of_every_rule(name: str) -> None:
    rule, keep = RULES[name]
    n = keep.shape[-1]
    q = torch.randn(B, H, n, D, dtype=torch.float64)
    k, v = torch.randn(2, B, KEY_HEADS, n, D, dtype=torch.float64).unbind()
    for option, o in options_of(n).items():
        expected, expected_lse = dense(q, k, v, keep, **o)
        for path, attend in paths(n).items():
            how = {"enable_gqa": True, "return_lse": True, **o}
            if word := refusal(name, option, path):
                with pytest.raises((ValueError, TypeError), match=word):
                    attend(q, k, v, rule, **how)
                continue
            out, lse = attend(q, k, v, rule, **how)
            assert relative_error(out, expected) < 1e-12, (option, path)
            finite = lse > -math.inf
            assert torch.equal(finite, expected_lse > -math.inf), (option, path)
            assert relative_error(lse[finite], expected_lse[finite]) < 1e-12, (option, path)


def test_gradients_of_a_neighborhood_with_lengths() -> None:
    rule, keep = RULES["neighborhood"]
    o = options_of(256)["sinks"]
    q = torch.randn(B, H, 256, D, dtype=torch.float64, requires_grad=True)
    k, v = torch.randn(2, B, KEY_HEADS, 256, D, dtype=torch.float64).requires_grad_().unbind()
    found = sparse_attention(q, k, v, rule, enable_gqa=True, **o)
    cotangent = torch.randn_like(found)
    grads = [torch.autograd.grad(x, (q, k, v), cotangent) for x in (found, dense(q, k, v, keep, **o)[0])]
    for mine, theirs in zip(*grads, strict=True):
        assert relative_error(mine, theirs) < 1e-12
