"""Attention over lists of keys per query, against `ringtile.testing.oracle`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from oracle import SDPA_BUDGET, Inputs, make_inputs, relative_error, results, sdpa_low_precision_error, worst
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from ringtile import build_index, dilated_attention, in_slices, sparse_attention
from ringtile.adaptive import AdaptiveAttention, index_topk
from ringtile.functional import chosen
from ringtile.kernels.blockwise import lists as blockwise_lists
from ringtile.kernels.contracts import Lists
from ringtile.patterns import (
    Causal,
    Chosen,
    Documents,
    GlobalTokens,
    Pattern,
    RandomBlocks,
    Window,
    from_mask,
    per_head,
)
from ringtile.testing.oracle import attention, kept_pairs
from ringtile.tools.memory import peak_memory

BATCH, HEADS, KEY_HEADS, QUERIES, KEYS, PLACES = 2, 4, 2, 37, 53, 6


def lists(batch: int = BATCH, groups: int = KEY_HEADS, block: int = 1, dtype: torch.dtype = torch.int64) -> Tensor:
    """Lists in any order, with -1 anywhere, keys twice, a row without any, and the last block, which is ragged."""
    indices = torch.randint(-1, -(-KEYS // block), (batch, groups, QUERIES, PLACES), dtype=dtype)
    indices[:, :, 3] = -1
    indices[:, :, 4] = indices[:, :, 4, :1]
    indices[:, :, 9, 2] = (KEYS - 1) // block
    return indices


attend = partial(sparse_attention, enable_gqa=True, return_lse=True)


def assert_right(inputs: Inputs, pattern: Pattern, backend: str | None = None, **options: Any) -> None:
    found, expected = (
        results(attend, inputs[:3], pattern, backend=backend, **options),
        results(attention, inputs[:3], pattern, **options),
    )
    assert worst(found, expected) < 1e-12


@pytest.fixture
def inputs() -> Inputs:
    return make_inputs(BATCH, HEADS, QUERIES, KEYS, 8, kv_heads=KEY_HEADS, value_dim=5)


BY_ROW = Documents(ids=[[0] * 20 + [1] * 33, [0] * 41 + [1] * 12])

RULES: dict[str, Callable[[Pattern], Pattern]] = {
    "window": lambda c: c & Window(5),
    "documents by row": lambda c: c & BY_ROW,
    "documents": lambda c: Causal() & c & Documents([11, 30, 12]),
    "or sinks, causal": lambda c: Causal() & (Window(5) | c | GlobalTokens(2)),
    "far away, or a window in documents": lambda c: (c & ~Window(5) | Window(5)) & BY_ROW,
    "by key head": lambda c: c & ~per_head([Window(2), Window(2), Window(9), Window(9)]),
}


@pytest.mark.parametrize("block", [1, 16, 64])
@pytest.mark.parametrize("name", RULES)
def test_every_rule(name: str, block: int, inputs: Inputs) -> None:
    for batch, groups in ((1, KEY_HEADS), (BATCH, 1)):
        assert_right(inputs, RULES[name](Chosen(lists(batch, groups, block, torch.int32), block)), "blockwise")


@pytest.mark.parametrize("rule", [lambda c: c, RULES["or sinks, causal"]], ids=["lists", "or sinks"])
def test_padding(rule: Callable[[Pattern], Pattern], inputs: Inputs) -> None:
    token = torch.arange(KEYS)
    for mask in (torch.stack([token >= 9, token < 40]), torch.stack([token < 0, token >= 0])):
        assert_right(inputs, rule(Chosen(lists(block=16), 16)), key_mask=mask)


def test_lists_and_the_pairs_beside_them_draw_one_seed(inputs: Inputs) -> None:
    pattern, found = Chosen(lists()) | Window(3), []
    for given in (False, True):
        torch.manual_seed(3)
        seed = torch.randint(-(2**63), 2**63 - 1, (1,)) if given else None
        found.append(attend(*inputs[:3], pattern, dropout_p=0.4, seed=seed)[0])
    assert torch.equal(*found)


@pytest.mark.parametrize("size", ["entry", "two", "rows"])
def test_lists_in_pieces(size: str, inputs: Inputs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Places of one row in several pieces are merged, and rows are judged and sorted in several parts."""
    monkeypatch.setattr(blockwise_lists, "_BYTES", {"entry": 1, "two": 2 * 8 * 8, "rows": 5 * 8 * 8 * PLACES}[size])
    monkeypatch.setattr(chosen, "_ENTRIES", 40)
    # Small pieces are many.
    rows = {"entry": 11, "two": 19, "rows": QUERIES}[size]
    inputs = inputs._replace(q=inputs.q[:, :, :rows])
    for block, rule in ((1, lambda c: Causal() & c), (4, lambda c: Causal() & (c & ~Window(5)))):
        pattern = rule(Chosen(lists(block=block)[:, :, :rows], block))
        assert_right(inputs, pattern, start=KEYS - QUERIES, dropout_p=0.2, seed=1, softcap=2.0)


def test_keys_that_a_query_does_not_keep_are_never_used(inputs: Inputs) -> None:
    # No list has an odd key.
    indices, lengths = lists(groups=1), torch.tensor([KEYS, 30])
    chosen = Chosen(torch.where(indices < 0, -1, indices // 2 * 2))
    for pattern in (chosen, Causal() & chosen & ~Window(5), Causal() & (chosen | Window(2))):
        sizes = BATCH, HEADS, QUERIES, KEYS
        pairs = kept_pairs(pattern, *sizes, start=KEYS - QUERIES, key_lengths=lengths)
        rows, used = pairs.any(3), pairs.any(2).unflatten(1, (KEY_HEADS, -1)).any(2)
        masks = (x.logical_not().unsqueeze(3) for x in (rows, used, used))
        dirty = [x.masked_fill(mask, torch.nan) for x, mask in zip(inputs, masks, strict=False)]
        assert_right(Inputs(*dirty, inputs.grad_out), pattern, key_lengths=lengths)
        leaves = [x.requires_grad_() for x in dirty]
        out = attend(*leaves, pattern, key_lengths=lengths)[0]
        cotangents = inputs.grad_out, inputs.grad_out.masked_fill(~rows.unsqueeze(3), torch.nan)
        grads = (torch.autograd.grad(out, leaves, grad, retain_graph=True) for grad in cotangents)
        assert all(map(torch.equal, *grads))


def test_no_bit_depends_on_threads() -> None:
    inputs = make_inputs(1, 8, 200, 700, 64, kv_heads=2, dtype=torch.float32)
    indices = torch.rand(1, 2, 200, 700).topk(300).indices

    def run(threads: int) -> list[Tensor]:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            return results(attend, inputs[:3], Causal() & (Chosen(indices) | Window(9)), backend="blockwise")
        finally:
            torch.set_num_threads(before)

    assert all(map(torch.equal, run(1), run(2)))


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
    rule = Causal() & (Chosen(indices, block) if near < 0 else Chosen(indices, block) | Window(near))
    pattern = from_mask(kept_pairs(rule, 1, heads, 120, 150, start=30))
    # PyTorch has a kernel for values of the keys' width alone.
    v, grad_out = (torch.nn.functional.pad(x, (0, head_dim - value_dim)) for x in (inputs.v, inputs.grad_out))
    theirs = sdpa_low_precision_error(inputs.q, inputs.k, v, pattern, grad_out)
    leaves = [x.requires_grad_() for x in inputs[:3]]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    (out, lse), (true, true_lse) = attend(*leaves, rule, backend=backend), attention(*exact, rule)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    assert relative_error(lse, true_lse) < 1e-5
    assert relative_error(out, true) <= SDPA_BUDGET[dtype] * theirs.out
    grads = torch.autograd.grad(out, leaves, inputs.grad_out)
    for most, *pair in zip(
        theirs.grads.values(), grads, torch.autograd.grad(true, exact, inputs.grad_out.double()), strict=True
    ):
        assert relative_error(*pair) <= SDPA_BUDGET[dtype] * most


def test_a_step_of_decoding() -> None:
    """One query at the end of a long cache, whose rest is NaN, and the indexer that chose its keys."""
    q, k, v = torch.randn(1, 8, 1, 24), torch.randn(1, 1, 5000, 24), torch.randn(1, 1, 5000, 16)
    rule = Causal() & Chosen(index_topk(q, k, 64, pattern=Causal(), start=4200))
    kept = kept_pairs(rule, 1, 8, 1, 5000, start=4200)[0, 0, 0]
    assert kept.sum() == 64
    k, v = (x.masked_fill(~kept[:, None], torch.nan) for x in (k, v))
    assert worst(attend(q, k, v, rule, start=4200), attention(q, k, v, rule, start=4200)) < 1e-6


@pytest.mark.parametrize(("queries", "keys", "places"), [(0, 5, 3), (4, 0, 3), (4, 5, 0)])
@pytest.mark.parametrize(
    "rule", [lambda c: Causal() & (c & ~Window(5)), lambda c: c | Window(5)], ids=["far", "or near"]
)
def test_nothing_to_attend_to(rule: Callable[[Pattern], Pattern], queries: int, keys: int, places: int) -> None:
    pattern, mask = rule(Chosen(torch.full((1, 1, queries, places), -1), 4)), torch.arange(2 * keys).view(2, -1) > 0
    for name in ("blockwise", "reference"):
        assert_right(make_inputs(2, 2, queries, keys, 3), pattern, name, key_mask=mask)


def test_intervals_become_limits_and_all_else_lists_of_keys(inputs: Inputs) -> None:
    seen: list[Lists] = []
    forward, indices, token = blockwise_lists.forward, lists(1, 1, 4), torch.arange(KEYS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blockwise_lists, "forward", lambda *call: [seen.append(call[3]), forward(*call)][1])
        for pattern, mask in (
            (Causal() & Chosen(indices, 4), None),
            (Chosen(indices, 4) & BY_ROW, torch.stack([token >= 9, token < 40])),
            (Chosen(indices, 4) & ~Window(5), None),
            (Chosen(indices, 4), torch.stack([token % 3 > 0, token % 2 > 0])),
        ):
            attend(*inputs[:3], pattern, key_mask=mask)
    assert [(x.block, len(x.limits), len(x.indices)) for x in seen] == [(4, 1, 1), (4, 2, 1), (1, 1, 1), (1, 1, 2)]
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
    both = [gradient(*(x[number] for x in tensors), indices if shared else indices[number]) for number in range(2)]
    assert all(map(torch.equal, found, map(torch.stack, zip(*both, strict=True))))


@pytest.mark.skipif(torch.__version__ < "2.12", reason="docs/troubleshooting.md says what a graph needs")
@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")
def test_compiled(inputs: Inputs) -> None:
    torch._dynamo.reset()
    indices, leaves = lists(), [x.requires_grad_() for x in inputs[:3]]
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for order in (indices, indices.flip(3)):
        both = (torch.autograd.grad(by(*leaves, order), leaves) for by in (compiled, loss))
        assert worst(*both) < 1e-14


def test_fake_tensors() -> None:
    with FakeTensorMode():
        q, k = torch.empty(2, 4, 7, 8, dtype=torch.bfloat16), torch.empty(2, 1, 9, 8, dtype=torch.bfloat16)
        out, lse = attend(q, k, k[..., :6], Chosen(torch.empty(1, 1, 7, 3, dtype=torch.int64)))
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
    outs = [attend(q, *inputs[1:3], Chosen(lists()), backend=name)[0] for name in ("reference", "blockwise")]
    grads = [torch.autograd.grad(out.square().sum(), q, create_graph=True)[0].sum() for out in outs]
    assert torch.autograd.grad(grads[0], q)[0].any()
    message = "no second derivative, and none in forward mode; with backend='reference' it has"
    with pytest.raises(NotImplementedError, match=message):
        grads[1].backward()


def bad(value: int) -> Tensor:
    indices = lists()
    indices[1, 0, 7, 2] = value
    return indices


def of(x: Inputs, pattern: Pattern, **options: Any) -> None:
    attend(*x[:3], pattern, **options)


REFUSED: dict[str, tuple[Callable[[Inputs], Any], str]] = {
    "a key behind the last": (lambda x: of(x, Chosen(bad(KEYS))), rf"indices: .* below {KEYS} .*got {KEYS}$"),
    "a block behind the last": (lambda x: of(x, Chosen(bad(4) % 5, 16)), r"indices: .* below 4 .*block=16.*got 4$"),
    "a negative key": (lambda x: of(x, Causal() & Chosen(bad(-2))), "indices: .*got -2$"),
    "other queries": (lambda x: of(x, Chosen(lists()[:, :, 1:])), rf"indices: expected .*{QUERIES}, n\], got"),
    "other groups": (lambda x: of(x, Chosen(lists().repeat(1, 2, 1, 1))), "indices: expected .*1 or 2, 37"),
    "other batch": (lambda x: of(x, Chosen(lists(3))), "indices: expected .*1 or 2, 1 or 2"),
    "another device": (
        lambda x: of(x, Chosen(lists().to("meta"))),
        "indices: expected the query's device cpu, got meta",
    ),
    "three dimensions": (lambda x: Chosen(lists()[0]), "indices: expected four dimensions"),
    "a list": (lambda x: Chosen([[[[1]]]]), "indices: expected four dimensions .* got list"),  # type: ignore[arg-type]
    "floats": (lambda x: Chosen(lists().float()), "indices: expected int32 or int64, got torch.float32"),
    "a block of three": (lambda x: Chosen(lists(), 3), "block: expected a power of two .* got 3"),
    "no block": (lambda x: Chosen(lists(), 0), "block: expected a power of two .* got 0"),
    "two lists": (lambda x: of(x, Chosen(lists()) | Chosen(lists())), "pattern: expected Chosen once"),
    "a complement": (lambda x: of(x, Causal() & ~Chosen(lists())), "pattern: expected Chosen once .* elsewhere"),
    "by head": (lambda x: of(x, per_head([Chosen(lists())] * HEADS)), "pattern: expected Chosen once .* elsewhere"),
    "a rule that parts the heads of a list": (
        lambda x: of(x, Chosen(lists()) & ~per_head([Window(n) for n in range(HEADS)])),
        "pattern: expected a rule that is the same for all query heads of a key head",
    ),
    "random blocks by head": (
        lambda x: of(x, Chosen(lists()) & RandomBlocks(1, block=16)),
        "pattern: expected a rule that is the same",
    ),
    "other documents": (lambda x: of(x, Chosen(lists()) & Documents([5])), "documents of 5 tokens"),
    "a backend": (
        lambda x: of(x, Chosen(lists()), backend="dense"),
        r"backend: expected one of \(.*'blockwise', 'reference'\) for Chosen lists, got 'dense'",
    ),
    "a start": (lambda x: of(x, Chosen(lists()), start=1.5), "start: expected an integer or None, got 1.5"),
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
