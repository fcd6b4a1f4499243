"""Attention over lists of keys per query equals a dense masked softmax in float64 over the same pairs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from oracle import SDPA_BUDGET, Inputs, Oracle, make_inputs, oracle, relative_error, sdpa_low_precision_error
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from ringtile import build_index, dilated_attention, in_slices, sparse_attention
from ringtile.adaptive import AdaptiveAttention, index_topk
from ringtile.functional import chosen
from ringtile.kernels.blockwise import lists as blockwise_lists
from ringtile.kernels.contracts import Lists
from ringtile.patterns import Causal, Chosen, Documents, GlobalTokens, Pattern, RandomBlocks, Window, per_head
from ringtile.tools.memory import peak_memory

BATCH, HEADS, KEY_HEADS, QUERIES, KEYS, PLACES = 2, 4, 2, 37, 53, 6


@dataclass(frozen=True, eq=False, repr=False)
class Given(Pattern):
    """The pairs of a bool tensor ``[B, H, Nq, Nk]``, whose first query is at ``start``."""

    kept: Tensor
    start: int

    def allowed(self, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return self.kept[0, head, query - self.start, key]

    @property
    def batch_size(self) -> int | None:
        return len(self.kept) if len(self.kept) > 1 else None

    def batch_row(self, batch: int) -> Pattern:
        return Given(self.kept[batch : batch + 1], self.start)


def listed(indices: Tensor, block: int, n_keys: int = KEYS, heads: int = HEADS) -> Tensor:
    """The pairs of lists, one entry at a time, bool ``[B, H, Nq, Nk]``."""
    kept = torch.zeros(*indices.shape[:3], n_keys, dtype=torch.bool)
    for row in product(*map(range, indices.shape[:3])):
        for entry in indices[row].tolist():
            if entry >= 0:
                kept[row][entry * block : (entry + 1) * block] = True
    return kept.repeat_interleave(heads // indices.shape[1], 1)


def positions(n_queries: int = QUERIES, n_keys: int = KEYS, start: int | None = None) -> tuple[Tensor, Tensor]:
    first = n_keys - n_queries if start is None else start
    return first + torch.arange(n_queries)[:, None], torch.arange(n_keys)


def lists(batch: int = BATCH, groups: int = KEY_HEADS, block: int = 1, dtype: torch.dtype = torch.int64) -> Tensor:
    """Lists in any order, with -1 anywhere, keys twice, a row without any, and the last block, which is ragged."""
    indices = torch.randint(-1, -(-KEYS // block), (batch, groups, QUERIES, PLACES), dtype=dtype)
    indices[:, :, 3] = -1
    indices[:, :, 4] = indices[:, :, 4, :1]
    indices[:, :, 9, 2] = (KEYS - 1) // block
    return indices


def attend(inputs: Inputs, pattern: Pattern, sinks: Tensor | None = None, **options: Any) -> Oracle:
    """Ours, as `oracle` returns it, with a gradient of the lse of rows that have one."""
    leaves = {"q": inputs.q, "k": inputs.k, "v": inputs.v} | ({} if sinks is None else {"sinks": sinks})
    leaves = {name: x.detach().requires_grad_() for name, x in leaves.items()}
    q, k, v = (leaves[name] for name in "qkv")
    out, lse = sparse_attention(
        q, k, v, pattern, sinks=leaves.get("sinks"), enable_gqa=True, return_lse=True, **options
    )
    assert options.get("backend") == "reference" or out.transpose(1, 2).is_contiguous()
    grads = torch.autograd.grad([out, lse], list(leaves.values()), [inputs.grad_out, grad_lse(lse)])
    return Oracle(out.detach(), lse.detach(), dict(zip(leaves, grads, strict=True)))


def grad_lse(lse: Tensor) -> Tensor:
    values = torch.linspace(-1, 1, lse.numel(), dtype=lse.dtype).view(lse.shape)
    return values.masked_fill(lse.detach() == -math.inf, 0)


def expected_of(inputs: Inputs, kept: Tensor, start: int = KEYS - QUERIES, **options: Any) -> Oracle:
    found = oracle(*inputs[:3], Given(kept.expand(len(inputs.q), -1, -1, -1), start), start=start, **options)
    return oracle(
        *inputs[:3],
        Given(kept.expand(len(inputs.q), -1, -1, -1), start),
        start=start,
        grad_out=inputs.grad_out,
        grad_lse=grad_lse(found.lse),
        **options,
    )


def assert_same(found: Oracle, expected: Oracle, bound: float = 1e-12) -> None:
    assert relative_error(found.out, expected.out) < bound
    assert relative_error(found.lse, expected.lse) < bound
    assert found.grads.keys() == expected.grads.keys()
    for name, grad in expected.grads.items():
        assert relative_error(found.grads[name], grad) < bound, name


@pytest.fixture
def inputs() -> Inputs:
    return make_inputs(BATCH, HEADS, QUERIES, KEYS, 8, kv_heads=KEY_HEADS, value_dim=5)


QUERY, KEY = positions()
DOCUMENTS = Documents([11, 30, 12])
BY_ROW = Documents(ids=torch.tensor([[0] * 20 + [1] * 33, [0] * 41 + [1] * 12]))
OF_TOKEN = torch.tensor([0] * 11 + [1] * 30 + [2] * 12)
OF_ROWS = torch.tensor([[0] * 20 + [1] * 33, [0] * 41 + [1] * 12])
CAUSAL, NEAR, FIRST = KEY <= QUERY, (QUERY - KEY).abs() <= 5, (QUERY < 2) | (KEY < 2)

RULES: dict[str, tuple[Callable[[Pattern], Pattern], Callable[[Tensor], Tensor]]] = {
    "lists": (lambda c: c, lambda kept: kept),
    "causal": (lambda c: Causal() & c, lambda kept: kept & CAUSAL),
    "window": (lambda c: c & Window(5), lambda kept: kept & NEAR),
    "documents": (
        lambda c: Causal() & c & DOCUMENTS,
        lambda kept: kept & CAUSAL & (OF_TOKEN[QUERY] == OF_TOKEN),
    ),
    "documents by row": (
        lambda c: c & BY_ROW,
        lambda kept: kept & (OF_ROWS[:, KEYS - QUERIES :, None] == OF_ROWS[:, None]).unsqueeze(1),
    ),
    "without a window": (lambda c: Causal() & (c & ~Window(5)), lambda kept: kept & CAUSAL & ~NEAR),
    "or a window": (lambda c: c | Window(5), lambda kept: kept | NEAR),
    "or sinks, causal": (
        lambda c: Causal() & (Window(5) | c | GlobalTokens(2)),
        lambda kept: CAUSAL & (kept | NEAR | FIRST),
    ),
    "lists far away or a window in documents": (
        lambda c: (c & ~Window(5) | Window(5)) & BY_ROW,
        lambda kept: (kept | NEAR) & (OF_ROWS[:, KEYS - QUERIES :, None] == OF_ROWS[:, None]).unsqueeze(1),
    ),
}


@pytest.mark.parametrize("backend", ["blockwise", "reference"])
@pytest.mark.parametrize("block", [1, 4, 16, 64])
@pytest.mark.parametrize("name", RULES)
def test_every_rule(name: str, block: int, backend: str, inputs: Inputs) -> None:
    join, pairs = RULES[name]
    for batch in (1, BATCH):
        # Each block meets each number of groups, and lists of one group come for one batch element or for all.
        groups = 1 if (batch == 1) == (block in (1, 16)) else KEY_HEADS
        indices = lists(batch, groups, block, torch.int32 if groups == 1 else torch.int64)
        kept = pairs(listed(indices, block))
        found = attend(inputs, join(Chosen(indices, block)), backend=backend)
        assert_same(found, expected_of(inputs, kept))


OPTIONS: dict[str, dict[str, Any]] = {
    "holes": {"key_mask": torch.arange(BATCH * KEYS).view(BATCH, KEYS) % 3 > 0},
    "padding": {"key_mask": torch.stack([torch.arange(KEYS) >= 9, torch.arange(KEYS) < 40])},
    "no key": {"key_mask": torch.arange(BATCH)[:, None] > torch.zeros(KEYS)},
    "lengths": {"key_lengths": torch.tensor([40, 9])},
    "dropout": {"dropout_p": 0.3, "seed": 5},
    "dropout of others": {
        "dropout_p": 0.3,
        "seed": 5,
        "head_at": torch.tensor([7, 1, 2, 9]),
        "batch_at": torch.tensor([3, 1]),
    },
    "softcap": {"softcap": 2.0, "scale": 0.7},
    "alibi": {"alibi_slopes": torch.rand(HEADS, generator=torch.Generator().manual_seed(0)).double()},
    "sinks": {"sinks": torch.linspace(-1, 2, HEADS).double()},
    "all": {
        "key_lengths": torch.tensor([50, 33]),
        "dropout_p": 0.2,
        "seed": -3,
        "softcap": 3.0,
        "alibi_slopes": torch.linspace(0, 1, HEADS).double(),
        "sinks": torch.linspace(-1, 2, HEADS).double(),
    },
}


@pytest.mark.parametrize("backend", ["blockwise", "reference"])
@pytest.mark.parametrize("rule", ["lists", "or sinks, causal"])
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str, rule: str, backend: str, inputs: Inputs) -> None:
    for block in (1, 16):
        indices = lists(block=block)
        kept = RULES[rule][1](listed(indices, block))
        found = attend(inputs, RULES[rule][0](Chosen(indices, block)), backend=backend, **OPTIONS[name])
        assert_same(found, expected_of(inputs, kept, **OPTIONS[name]))


@pytest.mark.parametrize("start", [0, 5, 40])
def test_a_start(start: int, inputs: Inputs) -> None:
    query, key = positions(start=start)
    indices, options = lists(), {"dropout_p": 0.2, "seed": 1, "alibi_slopes": torch.linspace(0, 1, HEADS).double()}
    for pattern, kept in (
        (Causal() & Chosen(indices), listed(indices, 1) & (key <= query)),
        (Chosen(indices) | Window(3), listed(indices, 1) | ((query - key).abs() <= 3)),
    ):
        for backend in ("blockwise", "reference"):
            found = attend(inputs, pattern, start=start, backend=backend, **options)
            assert_same(found, expected_of(inputs, kept, start, **options))


def test_lists_and_the_pairs_beside_them_draw_one_seed(inputs: Inputs) -> None:
    pattern, found = Chosen(lists()) | Window(3), []
    for given in (False, True):
        torch.manual_seed(3)
        seed = torch.randint(-(2**63), 2**63 - 1, (1,)) if given else None
        found.append(sparse_attention(*inputs[:3], pattern, enable_gqa=True, dropout_p=0.4, seed=seed))
    assert torch.equal(*found)


def test_causal_by_the_argument(inputs: Inputs) -> None:
    indices = lists()
    assert_same(attend(inputs, Chosen(indices), is_causal=True), expected_of(inputs, listed(indices, 1) & CAUSAL))


@pytest.mark.parametrize("size", ["entry", "two", "rows"])
def test_lists_in_pieces(size: str, inputs: Inputs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Places of one row in several pieces are merged, and rows are judged and sorted in several parts."""
    monkeypatch.setattr(blockwise_lists, "_BYTES", {"entry": 1, "two": 2 * 8 * 8, "rows": 5 * 8 * 8 * PLACES}[size])
    monkeypatch.setattr(chosen, "_ENTRIES", 40)
    options: dict[str, Any] = {"dropout_p": 0.2, "seed": 1, "softcap": 2.0}
    # Small pieces are many.
    rows = {"entry": 11, "two": 19, "rows": QUERIES}[size]
    inputs = inputs._replace(q=inputs.q[:, :, :rows], grad_out=inputs.grad_out[:, :, :rows])
    for block, rule in ((1, "causal"), (4, "without a window")):
        indices, (join, pairs) = lists(block=block), RULES[rule]
        found = attend(inputs, join(Chosen(indices[:, :, :rows], block)), start=KEYS - QUERIES, **options)
        assert_same(found, expected_of(inputs, pairs(listed(indices, block))[:, :, :rows], **options))


def test_keys_that_a_query_does_not_keep_are_never_used() -> None:
    inputs = make_inputs(BATCH, HEADS, QUERIES, KEYS, 8, kv_heads=KEY_HEADS, value_dim=5)
    indices = lists(groups=1)
    # No list has an odd key.
    indices = torch.where(indices < 0, -1, indices // 2 * 2)
    for pattern, kept in (
        (Chosen(indices), listed(indices, 1)),
        (Causal() & Chosen(indices) & ~Window(5), listed(indices, 1) & CAUSAL & ~NEAR),
        (Causal() & (Chosen(indices) | Window(2)), CAUSAL & (listed(indices, 1) | ((QUERY - KEY).abs() <= 2))),
    ):
        used, rows = kept.any(2)[:, ::2], kept.any(3)
        assert not used.all()
        clean = attend(inputs, pattern, key_lengths=torch.tensor([KEYS, 30]))
        used = used & (KEY < torch.tensor([KEYS, 30])[:, None, None])
        rows = (kept & (KEY < torch.tensor([KEYS, 30])[:, None, None, None])).any(3)
        k, v = (x.masked_fill(~used.unsqueeze(3), math.nan) for x in (inputs.k, inputs.v))
        q, grad_out = (x.masked_fill(~rows.unsqueeze(3), math.nan) for x in (inputs.q, inputs.grad_out))
        found = attend(Inputs(q, k, v, grad_out), pattern, key_lengths=torch.tensor([KEYS, 30]))
        for x, y in zip(
            (found.out, found.lse, *found.grads.values()), (clean.out, clean.lse, *clean.grads.values()), strict=True
        ):
            assert torch.equal(x, y)
        assert not found.out[~rows].any()
        assert not found.grads["q"][~rows].any()


def test_the_future_changes_nothing(inputs: Inputs) -> None:
    """Lists name keys after the query, and what comes later changes neither its output nor its gradient."""
    pattern, cut = Causal() & Chosen(lists()), 30
    assert (lists()[:, :, :5] > KEYS - QUERIES + 5).any()
    before = KEY <= KEYS - QUERIES + cut - 1
    other = inputs._replace(k=torch.where(before[:, None], inputs.k, 9), v=torch.where(before[:, None], inputs.v, -9))
    one, two = (attend(x, pattern) for x in (inputs, other))
    for x, y in ((one.out, two.out), (one.lse, two.lse), (one.grads["q"], two.grads["q"])):
        assert torch.equal(x[:, :, :cut], y[:, :, :cut])
        assert not torch.equal(x[:, :, cut:], y[:, :, cut:])


def test_no_bit_depends_on_threads() -> None:
    inputs = make_inputs(1, 8, 200, 700, 64, kv_heads=2, dtype=torch.float32)
    indices = torch.rand(1, 2, 200, 700).topk(300).indices

    def run(threads: int) -> Oracle:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            return attend(inputs, Causal() & (Chosen(indices) | Window(9)), backend="blockwise")
        finally:
            torch.set_num_threads(before)

    one, two = run(1), run(2)
    for x, y in zip((one.out, one.lse, *one.grads.values()), (two.out, two.lse, *two.grads.values()), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("backend", ["blockwise", None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("heads", "head_dim", "value_dim", "block", "near"),
    [(4, 64, 64, 1, -1), (4, 64, 32, 16, -1), (8, 576, 512, 1, -1), (4, 64, 64, 1, 20)],
)
def test_low_precision(
    heads: int, head_dim: int, value_dim: int, block: int, near: int, dtype: torch.dtype, backend: str | None
) -> None:
    """Latents are one key head of 576 with values of 512. A window beside the lists is merged with them."""
    kv_heads = 1 if head_dim > 64 else 2
    inputs = make_inputs(
        1, heads, 120, 150, head_dim, kv_heads=kv_heads, value_dim=value_dim, dtype=dtype, score_scale=0.3
    )
    indices = torch.rand(1, 1, 120, -(-150 // block)).topk(min(60, 150 // block)).indices
    query, key = positions(120, 150)
    pattern = Given((listed(indices, block, 150, heads) | ((query - key).abs() <= near)) & (key <= query), 30)
    # PyTorch has a kernel for values of the keys' width alone.
    v, grad_out = (torch.nn.functional.pad(x, (0, head_dim - value_dim)) for x in (inputs.v, inputs.grad_out))
    theirs = sdpa_low_precision_error(inputs.q, inputs.k, v, pattern, grad_out)
    expected = oracle(*inputs[:3], pattern, grad_out=inputs.grad_out)
    leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    rule = Causal() & (Chosen(indices, block) if near < 0 else Chosen(indices, block) | Window(near))
    out, lse = sparse_attention(*leaves, rule, enable_gqa=True, return_lse=True, backend=backend)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    assert relative_error(lse, expected.lse) < 1e-5
    assert relative_error(out, expected.out) <= SDPA_BUDGET[dtype] * theirs.out
    grads = torch.autograd.grad(out, leaves, inputs.grad_out)
    for name, grad in zip("qkv", grads, strict=True):
        assert relative_error(grad, expected.grads[name]) <= SDPA_BUDGET[dtype] * theirs.grads[name], name


def test_a_step_of_decoding() -> None:
    """One query at the end of a long cache, whose rest is NaN, and the indexer that chose its keys."""
    q, k, v = torch.randn(1, 8, 1, 24), torch.randn(1, 1, 5000, 24), torch.randn(1, 1, 5000, 16)
    indices = index_topk(q, k, 64, pattern=Causal(), start=4200)
    assert int(indices.max()) <= 4200
    kept = listed(indices, 1, 5000, 8)
    k, v = (x.masked_fill(~kept[0, 0, 0, :, None], math.nan) for x in (k, v))
    found = sparse_attention(q, k, v, Causal() & Chosen(indices), start=4200, enable_gqa=True, return_lse=True)
    expected = oracle(q, k, v, Given(kept, 4200), start=4200)
    assert relative_error(found[0], expected.out) < 1e-6
    assert relative_error(found[1], expected.lse) < 1e-6


@pytest.mark.parametrize(("queries", "keys", "places"), [(0, 5, 3), (4, 0, 3), (4, 5, 0), (0, 0, 0)])
@pytest.mark.parametrize("rule", ["lists", "without a window", "or a window"])
def test_nothing_to_attend_to(rule: str, queries: int, keys: int, places: int) -> None:
    inputs = make_inputs(2, 2, queries, keys, 3)
    indices = torch.full((1, 1, queries, places), -1)
    for name in ("blockwise", "reference"):
        found = attend(
            inputs, RULES[rule][0](Chosen(indices, 4)), backend=name, key_mask=torch.arange(2 * keys).view(2, -1) > 0
        )
        assert found.out.shape == inputs.grad_out.shape
        if rule != "or a window" or not keys:
            assert not found.out.any()
            assert bool((found.lse == -math.inf).all())
            assert not any(grad.any() for grad in found.grads.values())


def test_a_rule_by_head_chooses_for_each_key_head(inputs: Inputs) -> None:
    indices = lists(groups=1)
    pattern = Chosen(indices) & ~per_head([Window(2), Window(2), Window(9), Window(9)])
    near = torch.tensor([2, 2, 9, 9])[:, None, None] >= (QUERY - KEY).abs()
    for backend in ("blockwise", "reference"):
        assert_same(attend(inputs, pattern, backend=backend), expected_of(inputs, listed(indices, 1) & ~near))


def test_lists_are_canonical(inputs: Inputs) -> None:
    """Intervals become limits and leave the lists alone, all else makes lists of keys."""
    seen: list[Lists] = []
    forward = blockwise_lists.forward

    def spied(q: Tensor, k: Tensor, v: Tensor, lists: Lists, scale: float) -> tuple[Tensor, Tensor]:
        seen.append(lists)
        return forward(q, k, v, lists, scale)

    indices = lists(1, 1, 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blockwise_lists, "forward", spied)
        for pattern, mask in (
            (Causal() & Chosen(indices, 4), None),
            (Chosen(indices, 4) & BY_ROW, OPTIONS["padding"]["key_mask"]),
            (Chosen(indices, 4) & ~Window(5), None),
            (Chosen(indices, 4), OPTIONS["holes"]["key_mask"]),
        ):
            sparse_attention(*inputs[:3], pattern, enable_gqa=True, key_mask=mask)
    assert [each.block for each in seen] == [4, 4, 1, 1]
    assert [each.limits.shape[0] for each in seen] == [1, BATCH, 1, 1]
    assert [each.indices.shape[0] for each in seen] == [1, 1, 1, BATCH]
    for each in seen:
        entries = each.indices
        assert entries.dtype == each.limits.dtype == torch.int32
        assert entries.is_contiguous()
        assert each.limits.is_contiguous()
        assert int(each.limits.min()) >= 0
        assert int(each.limits.max()) <= KEYS
        assert bool(((entries[..., 1:] > entries[..., :-1]) | (entries[..., 1:] == -1)).all())
        assert int(entries.max()) < -(-KEYS // each.block)
    assert seen[0].limits[0, 4].tolist() == [0, KEYS - QUERIES + 5]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("by_bits", [True, False])
def test_lists_are_sorted(by_bits: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """By bits or as PyTorch sorts, for counts around whole words. No number twice, and none that does not exist."""
    monkeypatch.setattr(chosen, "_ENTRIES", 1 << 20 if by_bits else -1)
    for count in (0, 1, 7, 63, 64, 65, 128, 300):
        entries = torch.randint(-1, count + 2, (2, 3, 5, 80)).to(dtype)[..., ::2]
        found = chosen._ascending(entries, count)
        assert found.dtype == torch.int32
        for row, ours in zip(entries.flatten(0, 2).tolist(), found.flatten(0, 2).tolist(), strict=True):
            kept = sorted({x for x in row if 0 <= x < count})
            assert ours == kept + [-1] * (40 - len(kept))
        assert chosen._ascending(entries[..., :0], count).shape == (2, 3, 5, 0)


def test_gathered_keys_have_bounded_memory() -> None:
    """All gathered keys would take 256 MiB, and their gradients as much."""
    q, k = torch.randn(1, 2, 128, 128, requires_grad=True), torch.randn(1, 2, 4096, 128, requires_grad=True)
    pattern = Chosen(torch.rand(1, 1, 128, 4096).argsort())
    peaks = peak_memory(
        lambda: sparse_attention(q, k, k, pattern, backend="blockwise"),
        lambda out: torch.autograd.grad(out.sum(), (q, k)),
        torch.device("cpu"),
    )
    assert 1 << 23 <= peaks.forward < 4 << 23
    assert 1 << 23 <= peaks.backward < 8 << 23


def test_flops_are_counted() -> None:
    q, k = torch.randn(1, 4, 50, 16, requires_grad=True), torch.randn(1, 2, 90, 16)
    indices = torch.randint(0, 90, (1, 1, 50, 20))
    with FlopCounterMode(display=False) as counter:
        sparse_attention(q, k, k[..., :8], Chosen(indices), enable_gqa=True).sum().backward()
    assert counter.get_total_flops() == 2 * 4 * 50 * 20 * (24 + 3 * 16 + 2 * 8)


def loss(q: Tensor, k: Tensor, v: Tensor, indices: Tensor) -> Tensor:
    rule = Causal() & (Chosen(indices) | Window(4))
    return sparse_attention(q, k, v, rule, enable_gqa=True, dropout_p=0.1, seed=4).square().sum()


@pytest.mark.parametrize("case", ["each its own", "one for the batch", "one for all"])
def test_transforms(case: str, inputs: Inputs) -> None:
    """Examples with lists of their own, for each batch element or for all, and lists that all examples share."""
    shared, gradient = case == "one for all", torch.func.grad(loss, (0, 1, 2))
    tensors = [torch.stack([x, x.flip(0)]) for x in inputs[:3]]
    indices = (
        lists(1) if shared else torch.stack([lists(1 if case == "one for the batch" else BATCH) for _ in range(2)])
    )
    found = torch.vmap(gradient, (0, 0, 0, None if shared else 0))(*tensors, indices)
    each = [gradient(*(x[number] for x in tensors), indices if shared else indices[number]) for number in range(2)]
    for x, expected in zip(found, zip(*each, strict=True), strict=True):
        assert torch.equal(x, torch.stack(expected))


@pytest.mark.skipif(torch.__version__ < "2.12", reason="docs/troubleshooting.md says what a graph needs")
@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")
def test_compiled(inputs: Inputs) -> None:
    torch._dynamo.reset()
    indices, leaves = lists(), [x.requires_grad_() for x in inputs[:3]]
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for order in (indices, indices.flip(3)):
        expected = torch.autograd.grad(loss(*leaves, order), leaves)
        for x, y in zip(torch.autograd.grad(compiled(*leaves, order), leaves), expected, strict=True):
            assert relative_error(x, y) < 1e-14


def test_fake_tensors() -> None:
    with FakeTensorMode():
        q, k = torch.empty(2, 4, 7, 8, dtype=torch.bfloat16), torch.empty(2, 1, 9, 8, dtype=torch.bfloat16)
        out, lse = sparse_attention(
            q, k, k[..., :6], Chosen(torch.empty(1, 1, 7, 3, dtype=torch.int64)), enable_gqa=True, return_lse=True
        )
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == ((2, 4, 7, 6), torch.bfloat16, (2, 4, 7), torch.float32)


def test_autocast_casts_once() -> None:
    q, k = torch.randn(1, 2, 20, 8), torch.randn(1, 2, 20, 8)
    pattern = Chosen(torch.randint(0, 20, (1, 1, 20, 5))) | Window(2)
    with torch.autocast("cpu", torch.bfloat16):
        found = sparse_attention(q, k, k, pattern)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, sparse_attention(q.bfloat16(), k.bfloat16(), k.bfloat16(), pattern))


def test_only_the_reference_has_second_derivatives(inputs: Inputs) -> None:
    q = inputs.q.requires_grad_()
    for backend in ("reference", "blockwise"):
        out = sparse_attention(q, *inputs[1:3], Chosen(lists()), enable_gqa=True, backend=backend)
        grad = torch.autograd.grad(out.square().sum(), q, create_graph=True)[0]
        if backend == "reference":
            assert torch.autograd.grad(grad.square().sum(), q)[0].any()
        else:
            with pytest.raises(
                NotImplementedError,
                match="no second derivative, and none in forward mode; with backend='reference' it has",
            ):
                grad.square().sum().backward()


def bad(value: int) -> Tensor:
    indices = lists()
    indices[1, 0, 7, 2] = value
    return indices


REFUSED: dict[str, tuple[Callable[[Inputs], Any], str]] = {
    "a key behind the last": (lambda x: attend(x, Chosen(bad(KEYS))), rf"indices: .* below {KEYS} .*got {KEYS}$"),
    "a block behind the last": (lambda x: attend(x, Chosen(bad(4) % 5, 16)), r"indices: .* below 4 .*block=16.*got 4$"),
    "a negative key": (lambda x: attend(x, Causal() & Chosen(bad(-2))), "indices: .*got -2$"),
    "other queries": (lambda x: attend(x, Chosen(lists()[:, :, 1:])), rf"indices: expected .*{QUERIES}, n\], got"),
    "other groups": (lambda x: attend(x, Chosen(lists().repeat(1, 2, 1, 1))), "indices: expected .*1 or 2, 37"),
    "other batch": (lambda x: attend(x, Chosen(lists(3))), "indices: expected .*1 or 2, 1 or 2"),
    "another device": (
        lambda x: attend(x, Chosen(lists().to("meta"))),
        "indices: expected the query's device cpu, got meta",
    ),
    "three dimensions": (lambda x: Chosen(lists()[0]), "indices: expected four dimensions"),
    "a list": (lambda x: Chosen([[[[1]]]]), "indices: expected four dimensions .* got list"),  # type: ignore[arg-type]
    "floats": (lambda x: Chosen(lists().float()), "indices: expected int32 or int64, got torch.float32"),
    "a block of three": (lambda x: Chosen(lists(), 3), "block: expected a power of two .* got 3"),
    "no block": (lambda x: Chosen(lists(), 0), "block: expected a power of two .* got 0"),
    "two lists": (lambda x: attend(x, Chosen(lists()) | Chosen(lists())), "pattern: expected Chosen once"),
    "a complement": (lambda x: attend(x, Causal() & ~Chosen(lists())), "pattern: expected Chosen once .* elsewhere"),
    "by head": (lambda x: attend(x, per_head([Chosen(lists())] * HEADS)), "pattern: expected Chosen once .* elsewhere"),
    "a rule that parts the heads of a list": (
        lambda x: attend(x, Chosen(lists()) & ~per_head([Window(n) for n in range(HEADS)])),
        "pattern: expected a rule that is the same for all query heads of a key head",
    ),
    "random blocks by head": (
        lambda x: attend(x, Chosen(lists()) & RandomBlocks(1, block=16)),
        "pattern: expected a rule that is the same",
    ),
    "other documents": (lambda x: attend(x, Chosen(lists()) & Documents([5])), "documents of 5 tokens"),
    "a backend": (
        lambda x: attend(x, Chosen(lists()), backend="dense"),
        r"backend: expected one of \(.*'blockwise', 'reference'\) for Chosen lists, got 'dense'",
    ),
    "a start": (lambda x: attend(x, Chosen(lists()), start=1.5), "start: expected an integer or None, got 1.5"),
    "an index": (
        lambda x: build_index(Causal() & Chosen(lists()), QUERIES, KEYS, num_heads=HEADS, batch=BATCH),
        "pattern: expected one with an index of tiles, got Chosen",
    ),
    "density": (lambda x: Chosen(lists(1)).density(QUERIES, KEYS), "pattern: expected one with an index of tiles"),
    "adaptive": (
        lambda x: AdaptiveAttention()(x.q, x.q, x.q, pattern=Causal() & Chosen(lists())),
        "pattern: expected one with an index of tiles",
    ),
    "dilated": (
        lambda x: dilated_attention(x.q, x.q, x.q, segment_lengths=[32], dilation_rates=[1], pattern=Chosen(lists(1))),
        "pattern: expected one with an index of tiles",
    ),
    "slices": (
        lambda x: in_slices(2)(x.q, x.k, x.v, pattern=Chosen(lists()), enable_gqa=True),
        "(indices|pattern): expected",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, inputs: Inputs) -> None:
    run, message = REFUSED[name]
    with pytest.raises(ValueError, match=message) as caught:
        run(inputs)
    assert "\n" not in str(caught.value)
