"""Models of transformers that were trained sparse: what their indexers choose, in chunks, and learn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from families import (
    PLACES,
    TOKENS,
    Doubled,
    assert_equal_models,
    both,
    built,
    inputs_of,
    model_of,
    outcome,
    padding,
    registered,
)
from oracle import assert_near, refused
from tiny import SPARSE, hf
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ringtile.adaptive import index_topk
from ringtile.integrations.transformers import indexers
from ringtile.integrations.transformers.attention import attend
from ringtile.integrations.transformers.door import refuse_arguments
from ringtile.integrations.transformers.masks import pairs, pattern_mask
from ringtile.patterns import Causal, Window
from ringtile.testing.oracle import attention

KINDS = {"minimax_m3_vl": "right", "deepseek_v4": "no"}
"""How a batch of a family is padded, whose indexer reads padding on the left. By default on the left."""
ALL_CHOSEN = {
    "minimax_m3_vl": {"index_topk_blocks": 99},
    "qwen4_exp": {"indexer_budget": 400},
    "deepseek_v4": {"index_topk": 99},
    "glm5_next": {"index_topk": 400},
}


@pytest.fixture(autouse=True, scope="module")
def _registered() -> Iterator[None]:
    with registered():
        yield


@pytest.mark.parametrize("name", SPARSE)
def test_a_model_computes_in_float32_what_it_does_with_eager(name: str) -> None:
    """Gradients are compared by module: that of a scale alone is a sum which can nearly vanish."""
    inputs, mask = inputs_of(name, KINDS.get(name, "left"))
    first, second = (outcome(model, mask, inputs) for model in both(name, torch.float32))
    assert_near(second.pop("output"), first.pop("output"), 1e-5)
    for module in {key.rpartition(".")[0] for key in first}:
        grads = [
            torch.cat([x.flatten() for key, x in found.items() if key.rpartition(".")[0] == module])
            for found in (first, second)
        ]
        assert (grads[1] - grads[0]).norm() <= 1e-5 * grads[0].norm(), module


def test_the_texts_of_hy_v4_vl_are_those_of_hy_v4() -> None:
    # transformers has it since 5.24.
    module = pytest.importorskip("transformers.models.hy_v4_vl.modeling_hy_v4_vl")
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
    config = SPARSE["hy_v4"]()[1].to_dict() | {"model_type": "hy_v4_vl_text", "rope_parameters": rope}
    made, config = module.HYV4VLTextModel, hf.HYV4VLTextConfig(**config)
    eager, mine = (model_of(made, config, how, torch.float64) for how in ("eager", "use_ringtile"))
    inputs, mask = inputs_of("hy_v4", "left")
    with Doubled(), indexers.index_losses(mine) as losses:
        assert_equal_models(eager, mine, mask, 1e-10, **inputs)
    assert len(losses) == 2


def test_a_text_model_may_hand_its_tokens_to_attention() -> None:
    inputs, mask = inputs_of("glm5_next", "left")
    assert_equal_models(*(model.get_decoder() for model in both("glm5_next")), mask, 1e-10, **inputs)


def divergence(p: Tensor, scores: Tensor) -> Tensor:
    """The mean over rows of the divergence of the softmax of scores from attention p, over the keys that it has."""
    logs = scores.masked_fill(p == 0, -torch.inf).log_softmax(-1).masked_fill(p == 0, 0)
    return (torch.special.entr(p) + p * logs).sum().neg() / p[..., 0].numel()


class Recorded(TorchFunctionMode):
    """Records the products of the small heads of MiniMax-M3 (``matmul``) and what is ranked (``topk``)."""

    def __init__(self) -> None:
        super().__init__()
        self.products: list[Tensor] = []
        self.ranked: list[Tensor] = []

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.__name__ == "topk":
            self.ranked.append(args[0])
        if func.__name__ == "matmul":
            self.products.append(out)
        return out


def first_keys(runs: list[list[tuple[int, int]]]) -> Tensor:
    """The first key of each pool of 4 tokens in the runs of real tokens of each row, -1 behind the last."""
    rows = [[i for begin, end in row for i in range(begin, end - 3, 4)] for row in runs]
    longest = max(map(len, rows))
    return torch.tensor([row + [-1] * (longest - len(row)) for row in rows])


def scores_and_attention(
    name: str, kept: Recorded, weights: Tensor, runs: list[list[tuple[int, int]]]
) -> tuple[Tensor, Tensor]:
    """Scores and what they are to be, ``[B, G, Nq, entries]``, from what eager attention computes."""
    first, own = first_keys(runs), weights
    if name == "minimax_m3_vl":
        return kept.products[0] * kept.products[0].new_tensor(16.0) ** -0.5, weights.unflatten(1, (2, -1)).mean(2)
    scores = kept.ranked[0]
    if name == "qwen4_exp":
        # The indexer is a loop over queries, of which those without a whole pool in their run rank none.
        begins = [[max([begin for begin, _ in row if begin <= i], default=0) for i in range(TOKENS)] for row in runs]
        seen = (first[:, None] >= torch.tensor(begins).unsqueeze(2)) & (first >= 0)[:, None]
        seen &= first[:, None] + 3 <= torch.arange(TOKENS)[:, None]
        scores = torch.full_like(seen, -torch.inf, dtype=torch.float64)
        scores = scores.masked_scatter(seen, torch.cat(kept.ranked))
    if name in ("qwen4_exp", "glm5_next"):
        at = [(first + i).clamp(min=0)[:, None, None].expand(*weights.shape[:3], -1) for i in range(4)]
        own = sum(weights.gather(3, index) for index in at)  # type: ignore[assignment]
    # Sinks take a part of the weights, differently for each head.
    own = own[..., -scores.shape[2] :].masked_fill((scores < -1e30).unsqueeze(1), 0)
    own = (own / own.sum(3, keepdim=True)).nan_to_num(0)
    return scores.masked_fill(scores < -1e30, -torch.inf).unsqueeze(1), own.mean(1, keepdim=True)


@pytest.mark.parametrize(
    ("name", "kind", "warm_up"),
    [
        *(("deepseek_v32", "left", x) for x in (False, True)),
        *(("axk2", "left", False), ("mistral_large4", "left", False), ("dots3_note", "left", False)),
        *(("glm_moe_dsa", "left", True), ("hy_v4", "left", True), ("qwen4_exp", "packed", False)),
        *((name, "no" if name in KINDS else "left", x) for name in ALL_CHOSEN for x in (False, True)),
    ],
)
def test_losses_of_indexers(name: str, kind: str, warm_up: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The attention that eager heads pay to keys, pools and compressed keys, and the gradients to the indexers."""
    tokens, mask = torch.randint(3, 97, (3, TOKENS)), padding(kind)
    inputs = {"input_ids": tokens, "attention_mask": mask.long()}
    runs = [[(int(row.long().argmax()), TOKENS)] for row in mask]
    if kind == "packed":
        inputs = {"input_ids": tokens, "position_ids": PLACES, "use_cache": False}
        runs = [[(0, 30), (30, 31), (31, 61)], [(0, 7), (7, 61)], [(0, 61)]]
    chosen = ALL_CHOSEN.get(name, {"index_topk": TOKENS}) if warm_up else {}
    eager, mine = built(name, **chosen), built(name, "use_ringtile")
    recorded, weights = [], []
    for module in [*eager.modules(), *mine.modules()]:
        if name not in ALL_CHOSEN and type(module).__name__.endswith("Attention"):
            # That of attention is not the square root of its width, as with a longer context.
            module.scaling *= 1.3
    for label, module in eager.named_modules():
        if label.endswith(".indexer"):

            def forward(*given: Any, of: Any = module, **named: Any) -> Tensor:
                given = tuple(x.detach() if isinstance(x, Tensor) else x for x in given)
                named = {key: x.detach() if isinstance(x, Tensor) else x for key, x in named.items()}
                own = type(of).forward
                with torch.enable_grad(), Recorded() as kept:
                    found: Tensor = getattr(own, "__wrapped__", own)(of, *given, **named)
                recorded.append(kept)
                return found

            monkeypatch.setattr(module, "forward", forward)
            attention = eager.get_submodule(label.removesuffix(".indexer").removesuffix(".compressor"))
            attention.register_forward_hook(lambda _, given, out: weights.append(out[1].detach()))
    with Doubled():
        outputs = [eager(**inputs)[0]]
        with indexers.index_losses(mine, warm_up=warm_up) as losses:
            outputs.append(mine(**inputs)[0])
    # While indexers learn, attention is dense, or over what they chose.
    assert_near(outputs[1][mask], outputs[0][mask], 1e-10)
    assert len(losses) == len(recorded) == len(weights) > 0
    expected = []
    for kept, own in zip(recorded, weights, strict=True):
        # A row without keys has weights in eager attention, for padding too.
        wrong = (own[..., :TOKENS] * ~mask[:, None, None]).any(3, keepdim=True)
        scores, p = scores_and_attention(name, kept, own.masked_fill(wrong, 0), runs)
        expected.append(divergence(p, scores))
    assert min(expected) > 1e-3
    torch.testing.assert_close(torch.stack(losses), torch.stack(expected), rtol=1e-10, atol=1e-12)
    for loss in (losses, expected):
        sum(loss).backward()  # type: ignore[union-attr]
    compared = 0
    for (label, x), y in zip(mine.named_parameters(), eager.parameters(), strict=True):
        # Gradients reach indexers alone.
        assert (x.grad is None) == (".indexer." not in label), label
        if x.grad is not None:
            torch.testing.assert_close(x.grad, y.grad, rtol=1e-8, atol=1e-12)
            compared += bool(x.grad.any())
    assert compared >= (3 if name in ALL_CHOSEN else 4) * len(losses)


def test_losses_of_drawn_queries_and_models_without_indexers() -> None:
    model = built("deepseek_v32", "use_ringtile")
    with Doubled(), indexers.index_losses(model, rows=5) as losses:
        model(torch.randint(3, 97, (2, TOKENS)))
        model(torch.randint(3, 97, (2, TOKENS)))
    assert len(losses) == 6
    with Doubled():
        model(torch.randint(3, 97, (2, TOKENS)))
    assert len(losses) == 6
    assert all(loss.isfinite() and loss > 0 for loss in losses)
    assert not any(name == "_ringtile_learning" for module in model.modules() for name in module.__dict__)
    none = {"layer_types": ["heavily_compressed_attention"] * 2}
    for wrong in (built("deepseek_v4", "use_ringtile", **none), built("deepseek_v32", "ringtile")):
        with refused("model: expected indexers that choose"), indexers.index_losses(wrong):
            pass
    with refused("rows"), indexers.index_losses(model, rows=0):
        pass


@pytest.mark.parametrize("warm_up", [True, False])
@pytest.mark.parametrize("name", ["deepseek_v32", "dots3_note", "minimax_m3_vl", "glm5_next", "qwen4_exp"])
def test_indexers_learn_nothing_from_padding_on_the_right(name: str, warm_up: bool) -> None:
    tokens, mask = torch.randint(3, 97, (3, TOKENS)), padding("right")
    model, found = built(name, "use_ringtile"), []
    for ids in (tokens, torch.where(mask, tokens, 5)):
        with Doubled(), indexers.index_losses(model, warm_up=warm_up) as losses:
            model(ids, attention_mask=mask.long())
        learned = [x for label, x in model.named_parameters() if ".indexer." in label]
        found.append([*losses, *torch.autograd.grad(sum(losses), learned)])
    torch.testing.assert_close(found[1], found[0], rtol=1e-10, atol=1e-14)
    assert min(found[0][: len(losses)]) > 1e-4


@pytest.mark.parametrize("name", ["deepseek_v4", "glm5_next", "qwen4_exp"])
def test_inputs_that_are_shorter_than_a_pool(name: str) -> None:
    tokens = torch.randint(3, 97, (2, 3))
    eager, mine = both(name)
    with torch.no_grad(), Doubled():
        assert_near(mine(tokens)[0], eager(tokens)[0], 1e-10)
        for warm_up in (True, False):
            with indexers.index_losses(mine, warm_up=warm_up) as losses:
                mine(tokens)
            assert [float(loss) for loss in losses] == [0.0]


@pytest.mark.parametrize("name", [name for name in SPARSE if name != "qwen4_exp"])
def test_indexers_choose_in_chunks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(*given: Any, **named: Any) -> Tensor:
        calls.append(given)
        return index_topk(*given, **named)

    monkeypatch.setattr(indexers, "index_topk", counted)
    model = both(name)[1]
    with torch.no_grad(), Doubled():
        model(torch.randint(3, 97, (1, TOKENS)))
    names = [type(module).__name__ for module in model.modules()]
    assert len(calls) == sum(name in indexers.INDEXERS and name.endswith("Indexer") for name in names) > 0


@pytest.mark.parametrize("name", ["deepseek_v4", "qwen4_exp"])
def test_compiled_models_attend_outside_graphs(name: str) -> None:
    # Linear attention is a graph of 64 steps.
    kinds = {"layer_types": ["indexed_attention"], "num_hidden_layers": 1} if name == "qwen4_exp" else {}
    tokens, model = torch.randint(3, 97, (2, TOKENS)), built(name, "use_ringtile", torch.float32, **kinds)
    torch._dynamo.reset()
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend="eager")(tokens)[0], model(tokens)[0])


def test_incomplete_pools_are_no_choice() -> None:
    """Of a row with padding on the right, the third pool has no last token: transformers gives it that of token 0."""
    at, valid = torch.arange(12), torch.arange(12)[None] < 10
    ends, complete = torch.tensor([[3, 7, 0]]), torch.tensor([[True, True, False]])
    seen = indexers._visible(at, valid).gather(dim=-1, index=ends[:, None].expand(1, 12, -1)) & complete[:, None]
    kept = seen.kept
    found = kept.pattern.allowed(torch.tensor(0), at[:, None], torch.arange(3)) & kept.key_mask
    assert torch.equal(found, (ends <= at[:, None]) & complete)


class Softmaxed(nn.Module):
    """An indexer whose scores are not DeepSeek's."""

    def forward(self, query: Tensor, key: Tensor, mask: Tensor) -> Tensor:
        scores = torch.matmul(query, key.unsqueeze(1).mT)
        return scores.softmax(-1).sum(2).masked_fill(~mask, -torch.inf).topk(2).indices


def test_an_indexer_of_another_kind_is_refused() -> None:
    mask = pattern_mask(batch_size=1, q_length=5, kv_length=5)[:, 0]
    query, key = torch.randn(1, 5, 2, 4), torch.randn(1, 5, 4)
    # Alone, it gets the values of the mask.
    assert Softmaxed()(query, key, mask).shape == (1, 5, 2)
    with refused(r"^indexer: expected the scores of DeepSeek-V3.2's, got softmax"):
        indexers._choose_tokens(Softmaxed(), query, key, mask)


def test_a_pattern_limits_the_choice() -> None:
    query, key, value = torch.randn(3, 1, 4, 20, 8, dtype=torch.float64)
    indices = torch.rand(1, 20, 20).topk(6).indices.masked_fill(torch.rand(1, 20, 6) < 0.2, -1).int()
    chosen = torch.zeros(1, 20, 21, dtype=torch.bool).scatter(2, indices.long() % 21, True)[..., :20]
    kept = chosen & pairs(Causal() & Window(9), 0, 20, 20, torch.device("cpu"))
    found = attend(Window(9), nn.Module(), query, key, value, None, indices=indices)[0].transpose(1, 2)
    assert_near(found, attention(query, key, value, kept)[0], 1e-12)


def test_shards_refuse_a_choice() -> None:
    with refused(r"^indices: ringtile does not support keys chosen by an indexer"):
        refuse_arguments({"indices": torch.zeros(1, 5, 2)})
