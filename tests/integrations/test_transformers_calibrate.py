"""Calibration of a model of transformers: its rows, its facts, and the attention that it leads to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import refused
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from ringtile import sparse_attention
from ringtile.adaptive import (
    AdaptiveAttention,
    Calibration,
    Density,
    audit,
)
from ringtile.integrations.transformers import calibrate, model_facts, use_ringtile
from ringtile.integrations.transformers.calibrate import audited_rows, far_repeat, output_weight
from ringtile.testing.oracle import attention

N = 512


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    """A random model whose attention is far from even."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3}
    made = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)).eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                parameter.mul_(8)
    return made


@pytest.fixture(scope="module")
def ids() -> Tensor:
    some = torch.randint(256, (1, 3 * N // 4), generator=torch.Generator().manual_seed(0))
    return torch.cat((some, some[:, : N // 4]), 1)


class Kept(nn.Module):
    """Dense attention that keeps its queries, keys and values."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        self.kept = query, key, value
        return sparse_attention(query, key, value, **options)


def test_weights_and_thresholds_are_those_of_the_models_own_heads(model: LlamaForCausalLM, ids: Tensor) -> None:
    seen: list[int] = []
    found = calibrate(model, ids, progress=seen.append)
    assert seen == [0, 1, 2]
    assert [len(of_layer) for of_layer in found.weights] == [4, 4, 4]
    assert found.model == model_facts(model)
    layers = [Kept() for _ in range(3)]
    use_ringtile(model, attend=layers)
    with torch.no_grad():
        model(ids)
    rows, weights = audited_rows(far_repeat(ids[0]), 192, 0)
    even, cost = AdaptiveAttention(budget=Density(0.07)), []
    missed: list[Tensor] = []
    for number, layer in enumerate(layers):
        query, key, value = layer.kept
        index = even.index(query, key, is_causal=True, scale=16**-0.5)
        report = audit(query, key, value, index, rows=N, scale=16**-0.5)
        missed.append(((1 - report.recall[0, :, rows]) * weights).sum(1))
        causal = torch.ones(N, N, dtype=torch.bool).tril()
        exact, sparse = (attention(query, key, value, keep)[0] for keep in (causal, index.to_dense()))
        output = output_weight(model, number)
        assert output is not None
        parts = output.double().unflatten(1, (4, -1))
        wrong = torch.einsum("bhnd,ehd->bhne", sparse - exact, parts)[0, :, rows].square().sum(2)
        whole = torch.einsum("bhnd,ehd->bne", exact, parts)[0, rows].square().sum(1)
        cost.append((wrong * weights).sum(1) / (whole * weights).sum())
    every, errors = torch.cat(missed), torch.cat(cost)
    expected = 1 / every.mean() + errors / every / errors.mean()
    expected = (expected / expected.mean()).clamp(0.2, 6) ** 0.25
    torch.testing.assert_close(torch.tensor(found.weights).flatten().double(), expected, rtol=1e-3, atol=1e-4)
    for density in (0.2, 0.25, 0.4):
        realized = [
            attend.index(*layer.kept[:2], is_causal=True, scale=16**-0.5).tile_density
            for attend, layer in zip(found.attention(density), layers, strict=True)
        ]
        assert sum(realized) / 3 == pytest.approx(density, abs=0.003)


def test_a_stored_calibration_attends_as_before(model: LlamaForCausalLM, ids: Tensor, tmp_path: Path) -> None:
    found = calibrate(model, ids, rows=48)
    found.save(tmp_path / "calibration.json")
    again = Calibration.load(tmp_path / "calibration.json")
    again.check(model_facts(model))
    for density in (0.1, 0.3):
        outs = []
        for each in (found, again):
            use_ringtile(model, attend=each.attention(density))
            with torch.no_grad():
                outs.append(model(ids).logits)
        assert torch.equal(*outs)
    use_ringtile(model)
    with torch.no_grad():
        assert not torch.allclose(model(ids).logits, outs[0], atol=1e-3)


def test_a_calibrated_model_computes_dense_attention_afterwards(model: LlamaForCausalLM, ids: Tensor) -> None:
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(ids).logits
    calibrate(model, ids, rows=48)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, expected, atol=1e-4, rtol=1e-4)


def test_texts_that_cannot_calibrate_are_refused(model: LlamaForCausalLM) -> None:
    alone = torch.randint(256, (1, N), generator=torch.Generator().manual_seed(0))
    with refused("ids: expected a far repeat of at least 32 of its 512 tokens, got none"):
        calibrate(model, alone)
    with refused(r"ids: expected \[1, N\], got ids.shape=torch.Size\(\[512\]\)"):
        calibrate(model, alone[0])


@pytest.mark.parametrize(
    ("period", "length", "expected"),
    [(300, 400, 100), (80, 400, 0), (100, 400, 300), (390, 400, 0), (380, 400, 0), (370, 400, 30), (5, 20, 0)],
)
def test_far_repeats(period: int, length: int, expected: int) -> None:
    """Near repeats are no far ones, and a few tokens are none."""
    near = far_repeat(torch.arange(length) % period)
    assert int(near.sum()) == expected


def test_audited_rows_weigh_the_repeat_as_much_as_the_text() -> None:
    repeated = torch.zeros(4096, dtype=torch.bool)
    repeated[3000:] = True
    rows, weights = audited_rows(repeated, 192, 3)
    assert (len(rows), int(repeated[rows].sum())) == (192, 64)
    assert torch.equal(rows, rows.unique())
    assert float(weights[repeated[rows]].sum()) == pytest.approx(0.5)
    assert float(weights.sum()) == pytest.approx(1)
    assert not torch.equal(rows, audited_rows(repeated, 192, 4)[0])
