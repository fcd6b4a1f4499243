"""Gates: learned scores of tiles, distilled from exact attention or trained with the model."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from oracle import kept_pairs, make_inputs
from torch import Tensor

from ringtile import SparseTransformer, sparse_attention
from ringtile.adaptive import (
    AdaptiveAttention,
    Blend,
    Density,
    Gate,
    RoutedAttention,
    Scores,
    TopK,
    View,
    audit,
    choice,
    distill,
    select,
    view,
    with_coordinates,
)
from ringtile.index import BlockIndex, build_index
from ringtile.patterns import Causal, Dense, Documents, Pattern, Window, per_head

BLOCK = 16
RULES: dict[str, Pattern] = {
    "all pairs": Dense(),
    "causal": Causal(),
    "documents": Causal() & Documents([90, 60, 51]),
    "heads": per_head([Causal(), Causal() & Window(40)] * 2),
}


def base_of(rule: Pattern, n_queries: int, n_keys: int, batch: int = 2) -> BlockIndex:
    return build_index(rule, n_queries, n_keys, num_heads=4, batch=batch, block=BLOCK)


def trained(gate: Gate, seed: int = 0) -> Gate:
    """The gate with parameters that are not those of its start."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for x in gate.parameters():
            x.add_(torch.randn(x.shape, generator=generator) * 0.3)
    return gate


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("pool", ["max", "mean", None])
def test_a_new_gate_has_the_scores_of_blend(rule: Pattern, masked: bool, pool: Any) -> None:
    q, k, *_ = make_inputs(2, 4, 201, 201, 32, kv_heads=2)
    key_mask = torch.rand(2, 201) < 0.8 if masked else None
    base = base_of(rule, 201, 201)
    gate, blend = Gate(4, 32, num_kv_heads=2, pool=pool), Blend(pool)
    assert (gate.per_token, gate.causal_safe) == (blend.per_token, blend.causal_safe)
    for scale in (None, 0.3):
        found = [scores(View(q, k, base, key_mask, scale)) for scores in (gate, blend)]
        torch.testing.assert_close(*found, rtol=1e-5, atol=1e-7)


def codes(gate: Gate, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """The codes of all queries, which hold their weights, and of all keys."""
    q, k = (x / x.square().mean(3, keepdim=True).add(torch.finfo(x.dtype).eps).sqrt() for x in (q, k))
    of_query = (q @ gate.of_query + gate.query_bias).relu() * gate.weight * gate.head_dim**0.5
    return of_query, (k @ gate.of_key + gate.key_bias).relu()


def dense_loss(gate: Gate, q: Tensor, k: Tensor, base: BlockIndex, rows: Tensor, scale: float, local: int) -> Tensor:
    """The definition of `Gate.loss`, row by row, in float64."""
    n, block, cols = k.shape[2], base.block, base.n_cols
    of_query, of_key = codes(gate, q, k)
    total = torch.zeros((), dtype=torch.float64)
    for b, h, row in ((b, h, int(row)) for b in range(len(q)) for h in range(q.shape[1]) for row in rows):
        keys, query = k[b, h // (q.shape[1] // k.shape[1])], q[b, h, row]
        kept = kept_pairs(base, q, k)[b, h, row]
        mass = (keys @ query * scale).masked_fill(~kept, -math.inf).softmax(0)
        logits, share = [], []
        for col in range(cols):
            part = slice(col * block, min((col + 1) * block, n))
            if not base.tiles.expand(len(q), q.shape[1], -1, -1)[b, h, row // block, col]:
                continue
            if col == 0 or abs(row // block - col) <= local:
                continue
            mean, low, high = keys[part].mean(0), keys[part].amin(0), keys[part].amax(0)
            blend = query.clamp(min=0) @ ((mean + high) / 2) + query.clamp(max=0) @ ((mean + low) / 2)
            of_tile = of_key[b, h // (q.shape[1] // k.shape[1]), part].amax(0)
            logits.append((blend + of_query[b, h, row] @ of_tile) * scale + math.log(len(keys[part])))
            share.append(mass[part].sum())
        if share:
            p, logs = torch.stack(share), torch.stack(logits).log_softmax(0)
            total = total + torch.special.xlogy(p, p / p.sum()).sum() - (p * logs).sum()
    return total / (len(q) * q.shape[1] * len(rows))


@pytest.mark.parametrize("rule", [RULES["all pairs"], RULES["heads"]], ids=["all pairs", "heads"])
def test_the_loss_is_the_divergence_from_exact_attention(rule: Pattern) -> None:
    q, k, *_ = make_inputs(2, 4, 75, kv_heads=2)
    gate, base, rows = (
        trained(Gate(4, 16, num_kv_heads=2, places=9)).double(),
        base_of(rule, 75, 75),
        torch.tensor([74, 9, 40]),
    )
    for scale, local in ((0.25, 1), (0.5, 0)):
        for x in gate.parameters():
            x.grad = None
        found = gate.loss(View(q, k, base, scale=scale), rows, local=local)
        wanted = dense_loss(gate, q, k, base, rows, scale, local)
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-7)
        found.backward()
        for x, grad in zip(gate.parameters(), torch.autograd.grad(wanted, list(gate.parameters())), strict=True):
            assert x.grad is not None
            torch.testing.assert_close(x.grad, grad.to(x.dtype), rtol=1e-4, atol=1e-6)


def test_the_loss_leaves_masked_keys_and_the_model_alone() -> None:
    q, k, *_ = make_inputs(2, 4, 100, dtype=torch.float32)
    key_mask = torch.ones(2, 100, dtype=torch.bool)
    key_mask[0, 20:60] = False
    spoilt = k.clone()
    spoilt[0, :, 20:60] = math.nan
    gate, base, rows = trained(Gate(4, 16)), base_of(Causal(), 100, 100), torch.arange(0, 100, 7)
    losses, grads = [], []
    for keys in (k, spoilt):
        query, keys = q.clone().requires_grad_(), keys.clone().requires_grad_()
        loss = gate.loss(View(query, keys, base, key_mask), rows)
        losses.append(loss.detach())
        grads.append(torch.autograd.grad(loss, list(gate.parameters())))
        assert not loss.isnan()
        assert torch.autograd.grad(
            gate.loss(View(query, keys, base, key_mask), rows), [query, keys, gate.weight], allow_unused=True
        )[:2] == (None, None)
    assert torch.equal(*losses)
    assert all(torch.equal(*pair) for pair in zip(*grads, strict=True))


def texts(count: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Texts in which some tiles have wide keys, and queries see nothing of the width."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        q, k = torch.randn(2, 1, 2, 512, 16, generator=generator).unbind()
        wanted = (torch.rand(512 // BLOCK, generator=generator) * torch.arange(0, 512, BLOCK)).long()
        wanted = wanted.repeat_interleave(BLOCK)
        q[..., 2:] = 4 * k[:, :, wanted, 2:]
        q[..., 0] = q[..., 1] = 3 * q[..., 0].sign()
        wide = (torch.rand(512 // BLOCK, generator=generator) < 0.4).repeat_interleave(BLOCK)
        k[..., 0] *= 4 * wide
        k[..., 1] = -k[..., 0]
        found.append((q, k))
    return found


def decoys(count: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Texts in which the keys like a query are too short to matter, and other tiles are loud."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        k = 0.05 * torch.randn(1, 2, 512, 16, generator=generator)
        wanted = (torch.rand(512 // BLOCK, generator=generator) * torch.arange(0, 512, BLOCK)).long()
        q = 40 * k[:, :, wanted.repeat_interleave(BLOCK)]
        q[..., 0] += 4
        k[..., 0] += 4 * (torch.rand(512 // BLOCK, generator=generator) < 0.2).repeat_interleave(BLOCK)
        found.append((q, k))
    return found


def kept(scores: Scores, samples: list[tuple[Tensor, Tensor]]) -> float:
    """Mean recall at a density of 25%."""
    found = []
    for q, k in samples:
        index = select(q, k, scores, Density(0.25), is_causal=True, block=BLOCK)
        found.append(audit(q, k, k, index, rows=128).mean)
    return sum(found) / len(found)


@pytest.mark.parametrize("pool", ["max", None])
def test_a_distilled_gate_keeps_more_of_texts_that_it_never_saw(pool: Any) -> None:
    torch.manual_seed(0)
    gate = Gate(2, 16, places=32, pool=pool)
    found = distill(gate, texts(4, 1), texts(2, 2), is_causal=True, block=BLOCK, steps=60, learning_rate=1e-2)
    assert found.gate is gate
    assert found.history[0] == (0, found.untrained)
    assert (found.step, found.recall) in found.history
    assert found.recall == max(recall for _, recall in found.history)
    unseen = texts(2, 3)
    assert kept(gate, unseen) > kept(Blend(pool), unseen) + 0.05


def test_a_gate_stays_as_it_was_if_other_text_loses_by_it() -> None:
    torch.manual_seed(0)
    gate = Gate(2, 16, places=32, pool=None)
    start = {name: x.clone() for name, x in gate.state_dict().items()}
    options: dict[str, Any] = {"is_causal": True, "block": BLOCK, "learning_rate": 1e-2}
    found = distill(gate, texts(4, 1), decoys(2, 2), steps=200, every=10, patience=3, **options)
    assert (found.step, found.recall) == (0, found.untrained)
    assert [step for step, _ in found.history] == [0, 10, 20, 30]
    assert all(torch.equal(x, start[name]) for name, x in gate.state_dict().items())


def routed(seed: int = 0, **options: Any) -> RoutedAttention:
    torch.manual_seed(seed)
    gate = trained(Gate(4, 16, num_kv_heads=2, places=9, pool=None))
    return RoutedAttention(gate, Density(0.3), block=BLOCK, first=0, local=0, **options)


@pytest.mark.parametrize("straight_through", [False, True])
def test_routing_adds_nothing_to_the_output(straight_through: bool) -> None:
    q, k, v, _ = make_inputs(2, 4, 201, kv_heads=2)
    attend = routed(straight_through=straight_through)
    index = attend.index(q, k, is_causal=True)
    assert index.density < 0.6
    wanted = sparse_attention(q, k, v, index, enable_gqa=True)
    found = attend(q, k, v, is_causal=True, enable_gqa=True)
    assert attend.loss.requires_grad
    assert (found - wanted).abs().max() <= (1e-14 if straight_through else 0)
    assert torch.equal(attend.eval()(q, k, v, is_causal=True, enable_gqa=True), wanted)


@pytest.mark.parametrize("straight_through", [False, True])
def test_a_call_in_training_codes_each_tile_and_each_query_once(
    straight_through: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v, _ = (x.requires_grad_() for x in make_inputs(2, 4, 201, kv_heads=2))
    attend, calls = routed(straight_through=straight_through, rows=7), Counter[str]()

    def counting(name: str, function: Any) -> Any:
        def counted(*arguments: Any, **options: Any) -> Any:
            calls[name] += arguments[-1].shape[2] if name == "queries" else 1
            return function(*arguments, **options)

        return counted

    monkeypatch.setattr(Gate, "codes_of_queries", counting("queries", Gate.codes_of_queries))
    monkeypatch.setattr(Gate, "codes_of_tiles", counting("tiles", Gate.codes_of_tiles))
    for name in ("summaries", "build_index"):
        monkeypatch.setattr(view, name, counting(name, getattr(view, name)))
    monkeypatch.setattr(choice, "base_index", counting("base_index", choice.base_index))
    attend(q, k, v, is_causal=True, enable_gqa=True)
    # The gradient of the loss needs the codes of the drawn queries alone.
    drawn = 0 if straight_through else 7
    assert calls == {"queries": 201 + drawn, "tiles": 1, "summaries": 1, "base_index": 1, "build_index": 1}


@pytest.mark.parametrize("straight_through", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_the_loss_of_a_call_is_that_of_its_gate(straight_through: bool, masked: bool) -> None:
    q, k, v, _ = (x.requires_grad_() for x in make_inputs(2, 4, 201, kv_heads=2))
    attend = routed(straight_through=straight_through, rows=7)
    options = {"key_mask": torch.rand(2, 201) < 0.8 if masked else None, "scale": 0.3}
    torch.manual_seed(5)
    attend(q, k, v, is_causal=True, enable_gqa=True, **options)
    torch.manual_seed(5)
    rows, base = torch.randperm(201)[:7], base_of(Causal(), 201, 201)
    wanted = attend.scores.loss(View(q, k, base, **options), rows, first=0, local=0)
    torch.testing.assert_close(attend.loss, wanted, rtol=1e-5, atol=1e-7)
    found, wanted = (torch.autograd.grad(loss, list(attend.parameters())) for loss in (attend.loss, wanted))
    for ours, theirs in zip(found, wanted, strict=True):
        assert theirs.abs().max() > 0
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


def dense_routed(attend: RoutedAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Dense softmax whose logits have the gradient of the gate's coordinates, but not their value."""
    kept = attend.index(q, k, is_causal=True).to_dense()
    of_query, of_key = codes(attend.scores, q.detach(), k.detach())
    of_tile = [part.amax(2, keepdim=True).expand_as(part) for part in of_key.split(BLOCK, 2)]
    g = of_query @ torch.cat(of_tile, 2).repeat_interleave(2, 1).mT
    logits = (q @ k.repeat_interleave(2, 1).mT + g - g.detach()) * 0.25
    return logits.masked_fill(~kept, -math.inf).softmax(3) @ v.repeat_interleave(2, 1)


def test_straight_through_gradients_are_those_of_the_dense_definition() -> None:
    q, k, v, grad = (x.requires_grad_() for x in make_inputs(1, 4, 75, kv_heads=2))
    attend = routed(straight_through=True)
    attend.scores.double()
    inputs = [q, k, v, *attend.scores.parameters()]
    found = torch.autograd.grad(attend(q, k, v, is_causal=True, enable_gqa=True), inputs, grad)
    wanted = torch.autograd.grad(dense_routed(attend, q, k, v), inputs, grad)
    for ours, theirs in zip(found, wanted, strict=True):
        assert theirs.abs().max() > 1e-3
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


def test_coordinates_pass_gradcheck() -> None:
    """The constants of `with_coordinates` stay what they are, so that numbers can say what the gradient is."""
    q, k, v, _ = make_inputs(1, 2, 40, head_dim=4)
    of_query, of_key = torch.randn(2, 1, 2, 40, 3, dtype=torch.float64).unbind()
    inputs = [x.requires_grad_() for x in (q, k, v, of_query, of_key)]
    fixed = of_query.detach().clone(), of_key.detach().clone()

    def attention(q: Tensor, k: Tensor, v: Tensor, of_query: Tensor, of_key: Tensor) -> Tensor:
        query, key = torch.cat((q, of_query, -fixed[0]), 3), torch.cat((k, of_key, fixed[1]), 3)
        return sparse_attention(query, key, v, is_causal=True, scale=0.5)

    assert torch.autograd.gradcheck(attention, inputs)
    ours = sparse_attention(*with_coordinates(q, k, of_query, of_key), v, is_causal=True, scale=0.5)
    torch.testing.assert_close(ours, sparse_attention(q, k, v, is_causal=True, scale=0.5), rtol=0, atol=1e-14)
    grads = (torch.autograd.grad(out.square().sum(), inputs) for out in (ours, attention(*inputs)))
    for pair in zip(*grads, strict=True):
        torch.testing.assert_close(*pair, rtol=1e-12, atol=1e-14)


def test_the_loss_of_a_call_reaches_the_gate_alone() -> None:
    q, k, v, _ = (x.requires_grad_() for x in make_inputs(1, 4, 100, dtype=torch.float32, kv_heads=2))
    attend = routed(rows=8)
    with pytest.raises(RuntimeError, match="loss: the last call recorded no gradient"):
        attend.loss  # noqa: B018
    attend(q, k, v, is_causal=True, enable_gqa=True)
    attend.loss.backward()
    assert (q.grad, k.grad, v.grad) == (None, None, None)
    assert all(x.grad is not None and x.grad.abs().max() > 0 for x in attend.parameters())
    with torch.no_grad():
        attend(q, k, v, is_causal=True, enable_gqa=True)
    with pytest.raises(RuntimeError, match="loss: the last call recorded no gradient"):
        attend.loss  # noqa: B018


def test_training_sees_nothing_of_the_future() -> None:
    attend, n = routed(), 201
    q, k, v, _ = make_inputs(1, 4, n, dtype=torch.float32, kv_heads=2, score_scale=3.0)
    before = attend(q, k, v, is_causal=True, enable_gqa=True)
    for place in range(5, n, (n - 5) // 13 + 1):
        other = [x.clone() for x in (q, k, v)]
        for x in other:
            x[:, :, place] = 4 * torch.randn(x[:, :, place].shape)
        found = attend(*other, is_causal=True, enable_gqa=True)
        assert torch.equal(found[:, :, :place], before[:, :, :place])
        assert not torch.equal(found[:, :, place:], before[:, :, place:])
    attend.scores.pool = "max"
    with pytest.raises(ValueError, match="which training must not see"):
        attend(q.requires_grad_(), k, v, is_causal=True, enable_gqa=True)


def test_a_model_trains_each_layers_gate() -> None:
    gates = [Gate(2, 16, places=32, pool=None) for _ in range(2)]
    attend = [RoutedAttention(gate, block=BLOCK) for gate in gates]
    model = SparseTransformer(2, 32, 2, is_causal=True, attend=attend)
    for layer in model.layers:
        torch.nn.init.normal_(layer.output.weight)
    x = torch.randn(1, 200, 32)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    (model(x).square().mean() + sum(each.loss for each in attend)).backward()
    optimizer.step()
    assert all(gate.weight.abs().max() > 0 for gate in gates)
    assert not torch.equal(gates[0].of_key, gates[1].of_key)
    same = SparseTransformer(
        2, 32, 2, is_causal=True, attend=[RoutedAttention(Gate(2, 16, places=32), block=BLOCK) for _ in gates]
    )
    same.load_state_dict(model.state_dict())
    assert torch.equal(same.layers[0].attend.scores.of_key, gates[0].of_key)
    for one in (AdaptiveAttention(gates[0]), attend[0]):
        with pytest.raises(ValueError, match="attend: expected one for each of num_layers=2 layers"):
            SparseTransformer(2, 32, 2, is_causal=True, attend=one)


@pytest.mark.parametrize("pool", ["max", None])
def test_a_full_budget_has_the_bits_of_dense_attention(pool: Any) -> None:
    q, k, v, _ = make_inputs(2, 4, 201, dtype=torch.float32, kv_heads=2)
    gate = trained(Gate(4, 16, num_kv_heads=2, pool=pool))
    for budget in (Density(1.0), TopK(99)):
        found = AdaptiveAttention(gate, budget, block=BLOCK)(q, k, v, is_causal=True, enable_gqa=True)
        wanted = sparse_attention(q, k, v, build_index(Causal(), 201, num_heads=4, block=BLOCK), enable_gqa=True)
        assert torch.equal(found, wanted)


def test_batch_elements_are_alone() -> None:
    q, k, *_ = make_inputs(2, 4, 100, dtype=torch.float32, kv_heads=2)
    gate = trained(Gate(4, 16, num_kv_heads=2))
    both = gate(View(q, k, base_of(Causal(), 100, 100)))
    one = gate(View(q[1:], k[1:], base_of(Causal(), 100, 100, 1)))
    torch.testing.assert_close(both[1:], one, rtol=1e-5, atol=1e-7)
    spoilt = k.clone()
    spoilt[0] = math.nan
    assert torch.equal(gate(View(q, spoilt, base_of(Causal(), 100, 100)))[1], both[1])


def test_wrong_arguments_are_named() -> None:
    for wrong, message in (
        ({"places": 0}, "places: expected a positive integer, got 0"),
        ({"num_kv_heads": 3}, "num_kv_heads: expected a divisor of num_heads, got num_kv_heads=3, num_heads=4"),
        ({"pool": "first"}, "pool: expected 'max', 'mean' or None, got 'first'"),
    ):
        with pytest.raises(ValueError, match=message):
            Gate(4, 16, **wrong)
    gate, (q, k, *_) = Gate(4, 16), make_inputs(1, 2, 64, dtype=torch.float32)
    with pytest.raises(ValueError, match="query, key: expected 4 and 4 heads of 16, got"):
        gate(View(q, k, build_index(Causal(), 64, num_heads=2, block=BLOCK)))
    with pytest.raises(ValueError, match="gate: expected a Gate, got Blend"):
        RoutedAttention(Blend(None))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rows: expected a positive integer, got 0"):
        RoutedAttention(gate, rows=0)
    with pytest.raises(ValueError, match="steps: expected a positive integer, got 0"):
        distill(gate, [(q, k)], [(q, k)], steps=0)
    with pytest.raises(ValueError, match="samples, held_out: expected at least one of each, got 1 and 0"):
        distill(gate, [(q, k)], [])
    with pytest.raises(
        ValueError, match="held_out: expected other texts than the samples, got the same tensor in both"
    ):
        distill(gate, [(q, k)], [(q.clone(), k)])


def test_steps_of_generation_equal_the_call() -> None:
    torch.manual_seed(0)
    gate = trained(Gate(2, 16, places=16, pool=None))
    attend = RoutedAttention(gate, Density(0.3), block=BLOCK, first=0, local=0)
    model = SparseTransformer(1, 32, 2, is_causal=True, attend=attend).eval()
    torch.nn.init.normal_(model.layers[0].output.weight)
    x = torch.randn(1, 120, 32)
    with torch.no_grad():
        cache = model.new_cache()
        steps = [model(part, cache=cache) for part in x.split([90] + [1] * 30, 1)]
        torch.testing.assert_close(torch.cat(steps, 1), model(x), rtol=1e-5, atol=1e-5)
