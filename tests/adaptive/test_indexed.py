"""Indexers of dense decoders: what they start as, choose, learn, and choose again in generation."""

from __future__ import annotations

import copy
import io
import pickle
import re
from typing import Any

import pytest
import torch
from families import sharp
from oracle import make_inputs, refused, weights_of
from test_index_loss import dense_loss
from test_indexer import dense_topk, pairs_of
from test_transformers_decode import padded, tokens, whole
from torch import Tensor, nn

from ringtile import SparseTransformer, sparse_attention
from ringtile.adaptive import IndexedAttention, indexed, share_keys
from ringtile.index import build_index
from ringtile.integrations.transformers import use_ringtile
from ringtile.patterns import Causal, Dense, Documents, Pattern, Window, per_head


def trained(**options: Any) -> IndexedAttention:
    """An indexer in float64 whose parameters are not those of its start."""
    attend = IndexedAttention(4, 16, **{"keys": 20, "num_kv_heads": 2, "dim": 8, "first": 2, "local": 3} | options)
    for x in attend.parameters():
        x.data += 0.3 * torch.randn_like(x)
    return attend.double()


def index(attend: IndexedAttention, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """The indexer's queries and keys, head by head."""
    queries = [torch.cat([q[:, 2 * head], q[:, 2 * head + 1]], 2) @ attend.of_query[head] for head in range(2)]
    return torch.stack(queries, 1) + attend.query_bias, torch.stack([k[:, h] @ attend.of_key[h] for h in range(2)], 1)


def listed(attend: IndexedAttention, q: Tensor, k: Tensor, rule: Pattern, key_mask: Tensor | None = None) -> Tensor:
    """The chosen pairs ``[B, Hkv, Nq, Nk]``: the first ones, and the latest and best of the others."""
    others = (torch.arange(k.shape[2]) >= attend.first) & (torch.tensor(True) if key_mask is None else key_mask)
    how: dict[str, Any] = {"pattern": rule, "key_mask": others.expand(len(q), -1), "local": attend.local}
    kept = torch.ones(len(q), 2, q.shape[2], k.shape[2], dtype=torch.bool)
    for head, count in enumerate(attend.keys if isinstance(attend.keys, tuple) else (attend.keys,) * 2):
        small = [x[:, head : head + 1] for x in index(attend, q, k)]
        found = dense_topk(*small, count - attend.first, **how)[1][:, 0]
        kept[:, head] = (found.unsqueeze(3) == torch.arange(k.shape[2])).any(2)
    kept[..., : attend.first] = True
    return kept & pairs_of(q, k, rule, None, key_mask=key_mask)


def weights(q: Tensor, k: Tensor, kept: Tensor, scale: float) -> Tensor:
    """The attention ``[B, H, Nq, Nk]`` over pairs ``[B, Hkv, Nq, Nk]``."""
    return weights_of(q, k, kept.repeat_interleave(2, 1), scale)


RULES: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True},
    "all pairs": {},
    "window": {"is_causal": True, "pattern": Window(30)},
    "documents": {"is_causal": True, "pattern": Documents(ids=torch.arange(142).view(2, 71) // 30)},
    "padding": {"is_causal": True, "key_mask": torch.arange(71) >= torch.tensor([[30], [0]])},
    "fewer queries": {"is_causal": True, "queries": 33},
}


@pytest.mark.parametrize("keys", [20, (12, 33), (90, 9)], ids=["20", "12-33", "90-9"])
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("case", RULES.values(), ids=list(RULES))
def test_attention_is_exact_over_the_chosen_keys(
    case: dict[str, Any], train: bool, keys: int | tuple[int, ...]
) -> None:
    how = dict(case)
    q, k, v, grad = make_inputs(2, 4, how.pop("queries", 71), 71, kv_heads=2)
    attend = trained(keys=keys).train(train)
    attend.started.fill_(True)
    rule = how.get("pattern", Dense())
    kept = listed(attend, q, k, Causal() & rule if how.get("is_causal") else rule, how.get("key_mask"))
    assert kept.sum() < 0.6 * kept.numel()
    inputs = [x.requires_grad_() for x in (q, k, v)]
    wanted = weights(q, k, kept, 0.3) @ v.repeat_interleave(2, 1)
    found = attend(q, k, v, scale=0.3, enable_gqa=True, **how)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(*(torch.autograd.grad(x, inputs, grad) for x in (found, wanted)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("warm_up", [False, True])
def test_the_loss_of_a_call_is_that_of_its_indexer_alone(warm_up: bool) -> None:
    q, k, v, _ = (x.requires_grad_() for x in make_inputs(2, 4, 71, kv_heads=2))
    attend = trained(rows=9, keys=(12, 25))
    attend.started.fill_(True)
    attend.warm_up = warm_up
    key_mask = torch.rand(2, 71) < 0.8
    how: dict[str, Any] = {"is_causal": True, "key_mask": key_mask, "scale": 0.3, "enable_gqa": True}
    torch.manual_seed(5)
    out = attend(q, k, v, **how)
    torch.manual_seed(5)
    drawn = torch.randperm(71)[:9]
    options: dict[str, Any] = {"groups": 2, "pattern": Causal(), "scale": 0.3}
    if warm_up:
        torch.testing.assert_close(out, sparse_attention(q, k, v, **how))
    kept = listed(attend, q, k, Causal(), key_mask)
    if not warm_up:
        options["indices"] = torch.where(kept, torch.arange(71), -1)
    wanted = dense_loss(*index(attend, q.detach(), k.detach()), q, k, rows=drawn, key_mask=key_mask, **options)
    torch.testing.assert_close(attend.loss, wanted, rtol=1e-12, atol=1e-12)
    found, expected = (
        torch.autograd.grad(x, list(attend.parameters()), retain_graph=True) for x in (attend.loss, wanted)
    )
    for ours, theirs in zip(found, expected, strict=True):
        assert theirs.abs().max() > 1e-6
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    attend.loss.backward()
    assert (q.grad, k.grad, v.grad) == (None, None, None)
    with torch.no_grad():
        attend(q, k, v, **how)
    with pytest.raises(RuntimeError, match="loss: the last call recorded no gradient"):
        attend.loss  # noqa: B018
    # Out of training, attention is over the chosen keys.
    chosen = weights(q, k, kept, 0.3) @ v.repeat_interleave(2, 1)
    torch.testing.assert_close(attend.eval()(q, k, v, **how), chosen, rtol=1e-11, atol=1e-11)


def test_a_module_that_learned_is_copied_and_stored_without_its_loss() -> None:
    q, k, v, _ = make_inputs(1, 4, 40, kv_heads=2)
    attend = trained()
    expected, loss = attend(q, k, v, enable_gqa=True), attend.loss
    file = io.BytesIO()
    torch.save(attend, file)
    file.seek(0)
    for other in (copy.deepcopy(attend), pickle.loads(pickle.dumps(attend)), torch.load(file, weights_only=False)):
        with pytest.raises(RuntimeError, match="loss: the last call recorded no gradient"):
            _ = other.loss
        assert torch.equal(other.eval()(q, k, v, enable_gqa=True), expected)
    assert torch.optim.swa_utils.AveragedModel(attend).module.keys == 20
    assert attend.loss is loss


def test_an_indexer_starts_with_the_closest_products_of_its_rank() -> None:
    q, k, v, _ = make_inputs(2, 4, 300, kv_heads=2)
    # Queries and keys are long in some directions, and in others that do not matter to each other.
    q, k = q * torch.linspace(0.1, 3, 16), (k + 1) * torch.linspace(2, 0.1, 16).roll(4)
    attend = IndexedAttention(4, 16, keys=20, num_kv_heads=2, dim=8, first=0, local=0).double()
    attend(q, k, v, is_causal=True, scale=0.3, enable_gqa=True)
    assert bool(attend.started)
    small_q, small_k = index(attend, q, k)
    for head in range(2):
        queries, keys = q[:, 2 * head : 2 * head + 2].mean(1).flatten(0, 1), k[:, head].flatten(0, 1)
        # No matrix of rank 8 is closer to the products than their largest 8 parts.
        u, s, vh = torch.linalg.svd(0.3 * queries @ (keys - keys.mean(0)).mT, full_matrices=False)
        found = (
            small_q[:, head].flatten(0, 1) @ (small_k - small_k.mean((0, 2), keepdim=True))[:, head].flatten(0, 1).mT
        )
        torch.testing.assert_close(found, (u[:, :8] * s[:8]) @ vh[:8], rtol=1e-6, atol=1e-6)
    start = attend.of_query.clone()
    attend(2 * q.flip(3), k, v, is_causal=True, enable_gqa=True)
    assert torch.equal(attend.of_query, start)


def test_no_fewer_keys_than_there_are_is_dense_attention() -> None:
    q, k, v, _ = make_inputs(2, 4, 20, dtype=torch.float32, kv_heads=2)
    attend = IndexedAttention(4, 16, keys=20, num_kv_heads=2, dim=8, first=2, local=3)
    found = attend(q, k, v, is_causal=True, enable_gqa=True)
    assert torch.equal(found, sparse_attention(q, k, v, is_causal=True, enable_gqa=True))
    assert attend.loss > 0


def test_a_model_trains_each_layers_indexer_and_generates_what_it_computes() -> None:
    torch.manual_seed(0)
    attend = [IndexedAttention(2, 16, keys=20, dim=8, first=2, local=3) for _ in range(2)]
    model = SparseTransformer(2, 32, 2, is_causal=True, attend=attend).double()
    for layer in model.layers:
        nn.init.normal_(layer.output.weight)
    x = torch.randn(2, 120, 32, dtype=torch.float64)
    (model(x).square().mean() + sum(each.loss for each in attend)).backward()
    assert all(x.grad is not None and x.grad.abs().max() > 0 for each in attend for x in each.parameters())
    assert not torch.equal(attend[0].of_key, attend[1].of_key)
    same = [IndexedAttention(2, 16, keys=20, dim=8, first=2, local=3) for _ in range(2)]
    other = SparseTransformer(2, 32, 2, is_causal=True, attend=same).double()
    # The second head keeps all keys until there are 100.
    attend[1].keys = (15, 100)
    other.load_state_dict(model.state_dict())
    with refused("attend: expected one for each of num_layers=2 layers"):
        SparseTransformer(2, 32, 2, is_causal=True, attend=attend[0])
    with torch.no_grad():
        wanted, key_mask = other.eval()(x), torch.arange(120) >= torch.tensor([[7], [0]])
        for mask in (None, key_mask):
            cache, outs = other.new_cache(), []
            for first, last in ((0, 70), (70, 90), *((place, place + 1) for place in range(90, 120))):
                part = None if mask is None else mask[:, first:last]
                outs.append(other(x[:, first:last], part, cache=cache))
            wanted = other(x, mask)
            torch.testing.assert_close(torch.cat(outs, 1)[:, 7:], wanted[:, 7:], rtol=1e-10, atol=1e-10)


def test_generate_chooses_what_calls_over_all_tokens_choose() -> None:
    model, ids = sharp(dtype=torch.float64), tokens(n_tokens=70)
    sizes: dict[str, Any] = {"num_kv_heads": model.config.num_key_value_heads, "dim": 8, "first": 2, "local": 3}
    heads, width = model.config.num_attention_heads, model.model.layers[0].self_attn.head_dim
    attend = [IndexedAttention(heads, width, 24, **sizes).eval() for _ in range(model.config.num_hidden_layers)]
    dense = model.generate(ids, max_new_tokens=6, do_sample=False)
    use_ringtile(model, attend=attend)
    for mask in (torch.ones_like(ids), padded(ids)):
        options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
        found = model.generate(ids, **options)
        assert torch.equal(found, whole(model, ids, mask, 6))
        assert not torch.equal(found, dense)


CALLS: dict[str, dict[str, Any]] = RULES | {
    "masked": {"is_causal": True, "key_mask": torch.arange(71) < torch.tensor([[0], [50]]), "scale": 0.3},
    "more queries": {"queries": 80, "key_mask": torch.arange(71) >= torch.tensor([[30], [0]])},
}
COUNTS = [6, 9, 20, 33, 71, 90]


@pytest.mark.parametrize("case", CALLS.values(), ids=list(CALLS))
def test_what_fewer_keys_lose_is_measured_exactly(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexed, "_SCORES", 2 * 71 * 20)
    how = dict(case)
    q, k, v, _ = make_inputs(2, 4, how.pop("queries", 71), 71, kv_heads=2)
    attend = trained(rows=24)
    attend.started.fill_(True)
    rule, mask, n_queries = how.get("pattern", Dense()), how.get("key_mask"), q.shape[2]
    rule = Causal() & rule if how.get("is_causal") else rule
    attend.keys = 100
    allowed = listed(attend, q, k, rule, mask)
    p = weights(q, k, allowed, how.get("scale", 0.25)).unflatten(1, (2, 2)).mean(2)
    real = allowed[:, 0].any(2)
    if mask is not None and n_queries <= 71:
        real &= mask[:, 71 - n_queries :]
    measured = [int((i + 0.5) * n_queries / 24) for i in range(24)]
    real &= torch.isin(torch.arange(n_queries), torch.tensor(measured))
    sums = torch.zeros(4, len(COUNTS), dtype=torch.float64)
    attend._measured = torch.tensor(COUNTS), sums
    found = attend(q, k, v, enable_gqa=True, **how)
    attend._measured = None
    torch.testing.assert_close(found, sparse_attention(q, k, v, enable_gqa=True, **how))
    assert real.any()
    assert (sums[3] == real.sum()).all()
    for number, count in enumerate(COUNTS):
        attend.keys = count
        lost = 1 - (p * listed(attend, q, k, rule, mask)).sum(3)
        wanted = torch.stack([lost[:, head][real].sum() for head in range(2)])
        torch.testing.assert_close(sums[:2, number], wanted, rtol=1e-9, atol=1e-9)
        assert sums[2, number] == allowed[:, 0].sum(2).clamp(max=count)[real].sum()


def needs(attends: list[IndexedAttention], calls: list[Any], keys: int) -> tuple[list[int], list[float], list[Any]]:
    """The counts to choose from, the pairs of each, and the roots of what each head of all layers loses."""
    counts = sorted({max(6, round(keys * 2 ** (i / 4))) for i in range(-12, 9)})
    at, roots = torch.arange(1, 72), []
    for attend, (q, k, _, _) in zip(attends, calls, strict=True):
        p = weights(q, k, torch.ones(2, 2, 71, 71, dtype=torch.bool).tril(), 0.25).unflatten(1, (2, 2)).mean(2)
        parts = []
        for count in counts:
            attend.keys = count
            parts.append((1 - (p * listed(attend, q, k, Causal())).sum(3).mean((0, 2))).clamp(min=0).sqrt())
        roots += torch.stack(parts, 1).tolist()
    return counts, [float(at.clamp(max=count).double().mean()) for count in counts], roots


def test_keys_are_shared_out_where_they_lose_the_least() -> None:
    attends = [trained(rows=71) for _ in range(2)]
    # Layers and heads differ in how much their attention is spread.
    calls = [make_inputs(2, 4, 71, kv_heads=2, score_scale=scale) for scale in (1.0, 5.0)]
    for attend, (q, k, _, _) in zip(attends, calls, strict=True):
        k[:, 1] *= 0.3
        attend.start(q, k)
    counts, pairs, roots = needs(attends, calls, 12)
    same = counts.index(12)
    levels, left = [0] * 4, 4 * (pairs[same] - pairs[0])
    while steps := [
        ((roots[u][i] - roots[u][j]) / (pairs[j] - pairs[i]), u, j)
        for u, i in enumerate(levels)
        for j in range(i + 1, len(counts))
        if pairs[j] - pairs[i] <= left
    ]:
        _, unit, j = max(steps)
        left -= pairs[j] - pairs[levels[unit]]
        levels[unit] = j

    def run() -> list[Tensor]:
        how: dict[str, Any] = {"is_causal": True, "enable_gqa": True}
        return [attend(*call[:3], **how) for attend, call in zip(attends, calls, strict=True)]

    share_keys(attends, 12, run)
    assert [count for each in attends for count in each.keys] == [counts[level] for level in levels]
    assert len({count for each in attends for count in each.keys}) == 4
    assert 0.97 < sum(pairs[level] for level in levels) / (4 * pairs[same]) <= 1
    assert (
        sum(root[level] for root, level in zip(roots, levels, strict=True)) < sum(root[same] for root in roots) - 0.01
    )
    shares = [each.keys for each in attends]
    attends[1].keys = 9
    before = run()
    dense = sparse_attention(*calls[0][:3], is_causal=True, enable_gqa=True)
    assert not torch.allclose(before[0], dense)

    def fail() -> None:
        run()
        raise OSError("no such text")

    with pytest.raises(OSError, match="no such text"):
        share_keys(attends, 16, fail)
    assert [each.keys for each in attends] == [shares[0], 9]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(run(), before, strict=True))
    for change, said in (
        (([], 16, run), "attends: expected IndexedAttention modules, got []"),
        (([nn.Identity()], 16, run), "attends: expected IndexedAttention modules, got [Identity()]"),
        ((attends, 5, run), "keys: expected more than first + local, at least 6, got 5"),
        ((attends, 16.0, run), "keys: expected more than first + local, at least 6, got 16.0"),
        ((attends, 16, lambda: attends[0](*calls[0][:3], enable_gqa=True)), "none of attends[1]"),
    ):
        with refused(re.escape(said)):
            share_keys(*change)
    assert [each.keys for each in attends] == [shares[0], 9]


def test_shares_start_an_indexer_and_last_in_a_model() -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"num_kv_heads": 2, "dim": 8, "first": 2, "local": 3}
    attends = [IndexedAttention(4, 8, 20, **sizes).eval() for _ in range(2)]
    model = SparseTransformer(2, 32, 4, num_kv_heads=2, is_causal=True, attend=attends).eval()
    for layer in model.layers:
        nn.init.normal_(layer.output.weight)
    x = torch.randn(2, 150, 32)
    with torch.autocast("cpu", torch.bfloat16):
        share_keys(nn.ModuleList(attends), 20, lambda: model(x))
    assert all(each.started and isinstance(each.keys, tuple) for each in attends)
    wanted, shares = model(x), [each.keys for each in attends]
    others = [IndexedAttention(4, 8, 30, **sizes) for _ in range(2)]
    other = SparseTransformer(2, 32, 4, num_kv_heads=2, is_causal=True, attend=others).eval()
    other.load_state_dict(model.state_dict())
    assert [each.keys for each in others] == shares
    assert str(shares[0]) in repr(others[0])
    torch.testing.assert_close(other(x), wanted)
    others[0].keys = 25
    model.load_state_dict(other.state_dict())
    assert [each.keys for each in attends] == [25, shares[1]]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "num_kv_heads": ({"num_kv_heads": 3}, "num_kv_heads: expected a divisor of num_heads, got num_kv_heads=3"),
    "dim": ({"dim": 0}, "dim: expected a positive integer, got 0"),
    "dim of more": ({"dim": 17}, "dim: expected at most head_dim=16, got 17"),
    "rows": ({"rows": 0}, "rows: expected a positive integer, got 0"),
    "keys": ({"keys": 20, "first": 4, "local": 16}, "more than first + local, got keys=20 with first=4, local=16"),
    "keys of a head": ({"keys": (20, 21, 30, 40)}, "more than first + local, got keys=(20, 21, 30, 40)"),
    "keys of few heads": (
        {"keys": (30, 30)},
        "keys: expected an int, or a tuple with that of each key-value head, of more than",
    ),
    "no int": ({"keys": (30, 30, 30, 30.0)}, "got keys=(30, 30, 30, 30.0) with"),
    "first": ({"first": -1}, "first=-1"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=list(REFUSED))
def test_wrong_sizes_are_refused(case: tuple[dict[str, Any], str]) -> None:
    change, said = case
    with refused(re.escape(said)):
        IndexedAttention(4, 16, **{"dim": 8} | change)


def test_wrong_calls_are_refused() -> None:
    with refused(r"keys: .* got keys=5 with first=2, local=3, num_kv_heads=2"):
        trained().keys = 5
    q, k, v, _ = make_inputs(1, 4, 64, kv_heads=2)
    for change, said in (
        ({"start": 3}, "start: an indexer takes a key_mask and queries at the end instead"),
        ({"key_lengths": torch.tensor([3])}, "key_lengths: an indexer takes a key_mask"),
        ({"pattern": build_index(Causal(), 64)}, "pattern: expected a Pattern or its text, got BlockIndex"),
        ({"pattern": per_head([Causal(), Dense()] * 2)}, "pattern: expected a Pattern of all heads"),
    ):
        with refused(said):
            trained()(q, k, v, enable_gqa=True, **change)
    with refused("query, key: expected 4 and 2 heads of 16, got"):
        trained()(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))
