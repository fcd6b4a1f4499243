"""The loss that trains an indexer, computed in chunks, against the divergence of dense softmaxes in float64."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from oracle import refused
from test_indexer import pairs_of
from torch import Tensor

from ringtile.adaptive import index_loss, losses
from ringtile.patterns import Causal, Dense, Documents, Pattern, Window, per_head
from ringtile.tools.memory import peak_memory


def dense_loss(
    index_query: Tensor,
    index_key: Tensor,
    query: Tensor,
    key: Tensor,
    *,
    weights: Tensor | None = None,
    relu: bool = False,
    groups: int = 1,
    indices: Tensor | None = None,
    block: int = 1,
    pools: Tensor | None = None,
    rows: Tensor | None = None,
    pattern: Pattern | None = None,
    start: int | Tensor | None = None,
    key_mask: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """The definition, over tensors of all pairs."""
    (_, heads, _, head_dim), n_keys = query.shape, key.shape[2]
    scores = index_query @ index_key.repeat_interleave(index_query.shape[1] // index_key.shape[1], 1).mT
    scores = scores.relu() if relu else scores
    scores = scores if weights is None else scores * weights.unsqueeze(3)
    scores = scores.unflatten(1, (groups, -1)).sum(2)
    j, keep = torch.arange(n_keys), pairs_of(query, key, pattern, start, key_mask=key_mask)
    member = None
    if pools is not None:
        # Which keys are in which pools, [B, 1, 1, n_pools, Nk], of the pools that a query sees whole.
        member = ((j >= pools.unsqueeze(2)) & (j < pools.unsqueeze(2) + block) & (pools >= 0).unsqueeze(2))[
            :, None, None
        ]
        whole = (member & keep.unsqueeze(3)).sum(4) == block
        whole = whole if indices is None else whole & (indices.unsqueeze(4) == torch.arange(pools.shape[1])).any(3)
        keep = (member & whole.unsqueeze(4)).any(3)
    elif indices is not None:
        keep = keep & (indices.unsqueeze(4) == j // block).any(3)
    products = query @ key.repeat_interleave(heads // key.shape[1], 1).mT
    products = products * (head_dim**-0.5 if scale is None else scale)
    products = products.unflatten(1, (groups, -1)).masked_fill(~keep.unsqueeze(2), -math.inf)
    p = products.softmax(4).nan_to_num(0).mean(2)
    if member is not None:
        p, keep = (member * p.unsqueeze(3)).sum(4), whole
    logs = scores.masked_fill(~keep, torch.finfo(scores.dtype).min / 4).log_softmax(3)
    found = (torch.special.xlogy(p, p) - p * logs.masked_fill(~keep, 0)).sum(3)
    return (found if rows is None else found[:, :, rows]).mean()


def inputs(
    *, groups: int = 1, queries: int = 71, weighted: bool = False, dtype: torch.dtype = torch.float64, **how: Any
) -> tuple[list[Tensor], dict[str, Any]]:
    entries = how["pools"].shape[1] if "pools" in how else -(-71 // how.get("block", 1))
    index_keys = entries if "pools" in how else 71
    sizes = [(4, queries, 8), (how.pop("key_heads", groups), index_keys, 8), (6, queries, 16), (3, 71, 16)]
    tensors = [torch.randn(2, *size, dtype=torch.float64).to(dtype).requires_grad_() for size in sizes]
    if weighted:
        how["weights"] = torch.randn(2, 4, queries, dtype=torch.float64).to(dtype).requires_grad_()
    if how.pop("listed", False):
        # Lists that repeat keys, end in -1, and name keys that the rule or the mask drops.
        n = 13 if entries == 71 else 5
        how["indices"] = torch.randint(-4, entries, (2, groups, queries, n), dtype=torch.int32).clamp(min=-1)
        how["indices"][1, :, 5] = -1
    return tensors, how | {"groups": groups}


POSITIONS = torch.tensor([[-3], [0]]) + torch.arange(71)
POOLS = torch.stack([torch.arange(5, 71, 4), torch.arange(0, 68, 4)])
"""The first keys of pools of 4: the last of the first row ends after the keys."""
POOLS[1, 9] = -1
PADDED = torch.arange(71) >= torch.tensor([[5], [0]])
CASES: dict[str, dict[str, Any]] = {
    "all keys": {},
    "DeepSeek": {"relu": True, "weighted": True, "pattern": Causal()},
    "groups": {"groups": 2, "weighted": True, "pattern": Causal()},
    "one key head": {"groups": 2, "key_heads": 1, "pattern": Causal()},
    "lists": {"listed": True, "weighted": True, "relu": True, "pattern": Causal()},
    "lists of groups": {"listed": True, "groups": 2, "pattern": Causal() & Window(40), "queries": 63},
    "drawn rows": {"rows": torch.tensor([50, 3, 7, 3]), "relu": True, "pattern": Causal(), "weighted": True},
    "drawn lists": {"rows": torch.tensor([50, 3, 5]), "listed": True, "pattern": Causal()},
    "no rows before the keys": {"start": -20, "pattern": Causal(), "weighted": True},
    "documents": {"pattern": Causal() & Documents(ids=torch.arange(142).view(2, 71) // 20)},
    "padding": {"key_mask": torch.arange(71) >= torch.tensor([[30], [0]]), "pattern": Causal(), "relu": True},
    "padded lists": {"key_mask": torch.arange(71) >= torch.tensor([[30], [0]]), "listed": True},
    "positions": {"start": POSITIONS, "pattern": Causal(), "scale": 0.4},
    "blocks": {"block": 8, "listed": True, "groups": 2, "key_heads": 1, "pattern": Causal(), "queries": 63},
    "padded blocks": {"block": 4, "listed": True, "key_mask": PADDED, "pattern": Causal(), "weighted": True},
    "pools": {"block": 4, "pools": POOLS, "pattern": Causal(), "weighted": True, "relu": True},
    "pools of groups": {"block": 4, "pools": POOLS, "groups": 2, "key_mask": PADDED, "pattern": Window(30)},
    "chosen pools": {"block": 4, "pools": POOLS, "listed": True, "pattern": Causal(), "weighted": True, "queries": 63},
    "other length": {"queries": 34, "pattern": Causal()},
    "one query": {"queries": 1, "pattern": Causal(), "relu": True, "weighted": True},
}


def differentiated(loss: Tensor, tensors: list[Tensor], how: dict[str, Any]) -> tuple[Tensor, ...]:
    learned = tensors[:2] + ([how["weights"]] if "weights" in how else [])
    return loss.detach(), *torch.autograd.grad(2 * loss, learned)


@pytest.mark.parametrize("limit", [None, 12000], ids=["whole", "chunks"])
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_value_and_gradients_are_those_of_dense_softmaxes(
    case: dict[str, Any], limit: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if limit:
        monkeypatch.setattr(losses, "_BYTES", limit)
    tensors, how = inputs(**case)
    found, wanted = (differentiated(f(*tensors, **how), tensors, how) for f in (index_loss, dense_loss))
    for ours, theirs in zip(found, wanted, strict=True):
        assert theirs.abs().max() > 1e-3
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["DeepSeek", "lists", "chosen pools"])
def test_low_precision_is_at_most_as_far_off_as_dense_softmaxes(name: str, dtype: torch.dtype) -> None:
    tensors, how = inputs(**CASES[name], dtype=dtype)
    wide = [x.detach().double().requires_grad_() for x in tensors]
    wide_how = how | {"weights": how["weights"].detach().double().requires_grad_()}
    exact = differentiated(dense_loss(*wide, **wide_how), wide, wide_how)
    # Sums in low precision would be far off: these are in float32, and only the results are rounded.
    dense = [x.detach().float().requires_grad_() for x in tensors]
    dense_how = how | {"weights": how["weights"].detach().float().requires_grad_()}
    theirs = differentiated(dense_loss(*dense, **dense_how), dense, dense_how)
    # Autocast must not round the sums.
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        found = differentiated(index_loss(*tensors, **how), tensors, how)
    for ours, other, wanted in zip(found, theirs, exact, strict=True):
        bound = (other.to(ours.dtype).double() - wanted).abs().max()
        assert (ours.double() - wanted).abs().max() <= (3 if dtype == torch.float32 else 1.2) * bound + 1e-7


def test_the_layer_gets_no_gradient() -> None:
    tensors, how = inputs(**CASES["lists"])
    loss = index_loss(*tensors, **how)
    loss.backward(retain_graph=True)
    once = tensors[0].grad.clone()
    loss.backward()
    torch.testing.assert_close(tensors[0].grad, 2 * once)
    assert tensors[2].grad is None
    assert tensors[3].grad is None
    with torch.no_grad():
        assert torch.equal(index_loss(*tensors, **how), loss)


@pytest.mark.parametrize("name", ["DeepSeek", "lists", "pools"])
def test_the_future_and_masked_memory_change_nothing(name: str) -> None:
    tensors, how = inputs(**CASES[name])
    how["rows"] = torch.arange(40)
    before = differentiated(index_loss(*tensors, **how), tensors, how)
    for x in tensors:
        # Of the pools, those from the tenth on begin at token 40 or later.
        x.data[:, :, 40 if x.shape[2] == 71 else 10 :] = math.nan
    found = differentiated(index_loss(*tensors, **how), tensors, how)
    for ours, theirs in zip(found, before, strict=True):
        torch.testing.assert_close(ours, theirs)
    how["rows"] = torch.arange(41)
    assert index_loss(*tensors, **how).isnan()


@pytest.mark.parametrize(
    ("index_heads", "heads", "key_heads", "head_dim", "queries", "keys", "n", "pool"),
    [(64, 16, 1, 576, 20, 8192, None, 1), (16, 16, 1, 576, 20, 8192, 2048, 1), (4, 8, 2, 64, 300, 4096, None, 1),
     (4, 1, 1, 64, 2, 2**20, None, 1), (4, 1, 1, 8, 2, 2**18, 2**16, 1), (4, 1, 1, 512, 2, 2**17, None, 4)],
    ids=["DeepSeek", "lists", "many queries", "many keys", "long lists", "pools"],
)  # fmt: skip
def test_at_most_64_mib(
    index_heads: int, heads: int, key_heads: int, head_dim: int, queries: int, keys: int, n: int | None, pool: int
) -> None:
    small_query = torch.randn(1, index_heads, queries, 32, requires_grad=True)
    small_key, query = torch.randn(1, 1, keys // pool, 32, requires_grad=True), torch.randn(1, heads, queries, head_dim)
    key = torch.randn(1, key_heads, keys, head_dim)
    how: dict[str, Any] = {"relu": True, "pattern": Causal()}
    if pool > 1:
        how |= {"block": pool, "pools": torch.arange(0, keys, pool)[None]}
    if n is not None:
        how["indices"] = torch.randint(keys, (1, 1, queries, n))
    peak = peak_memory(
        lambda: index_loss(small_query, small_key, query, key, **how),
        lambda loss: torch.autograd.grad(loss, (small_query, small_key)),
        torch.device("cpu"),
    )
    # What is saved for the backward pass are the gradients.
    gradients = 4 * (small_query.numel() + small_key.numel())
    assert peak.forward <= 64 * 2**20 + gradients
    assert peak.backward is not None
    assert peak.backward <= 64 * 2**20 + gradients


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "groups": ({"groups": 3}, "groups", "groups=3"),
    "layer of other groups": ({"query": torch.zeros(2, 3, 71, 16), "groups": 2}, "query, key", "groups=2"),
    "layer of other keys": ({"key": torch.zeros(2, 3, 70, 16)}, "query, key", "70"),
    "layer of another batch": (
        {"query": torch.zeros(1, 6, 71, 16), "key": torch.zeros(1, 3, 71, 16)},
        "query, key",
        "[1, 6",
    ),
    "weights": ({"weights": torch.zeros(2, 1, 71)}, "weights", "(2, 4, 71)"),
    "pattern of heads": ({"pattern": per_head([Causal(), Dense()] * 2)}, "pattern", "all heads"),
    "positions": ({"start": torch.zeros(71, dtype=torch.int64)}, "start", "(2, 71)"),
    "lists": ({"indices": torch.zeros(2, 3, 71, 4, dtype=torch.int64)}, "indices", "(2, 1, 71)"),
    "floating lists": ({"indices": torch.zeros(2, 1, 71, 4)}, "indices", "float32"),
    "block": ({"block": 0}, "block", "got 0"),
    "pools": ({"pools": torch.zeros(2, 70, dtype=torch.int64)}, "pools", "[2, 70]"),
    "floating pools": ({"pools": torch.zeros(2, 71)}, "pools", "float32"),
    "pools of other keys": (
        {"pools": torch.zeros(2, 71, dtype=torch.int64), "key_mask": torch.ones(2, 70, dtype=torch.bool)},
        "key_mask",
        "70",
    ),
    "rows": ({"rows": torch.zeros(2)}, "rows", "float32"),
    "rows that are none": ({"rows": torch.tensor([3, 71])}, "rows", "71"),
    "key_mask": ({"key_mask": torch.ones(2, 70, dtype=torch.bool)}, "key_mask", "70"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=list(REFUSED))
def test_refused(case: tuple[dict[str, Any], str, str]) -> None:
    change, name, text = case
    tensors, how = inputs(dtype=torch.float32)
    given = dict(zip(("index_query", "index_key", "query", "key"), tensors, strict=True)) | how | change
    with refused(rf"^{name}: .*{re.escape(text)}"):
        index_loss(**given)
