"""Models of transformers that were trained sparse: the results of eager attention, and choices made in chunks."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from test_transformers import assert_equal_models, padding, randomized, registered
from tiny import SPARSE, hf
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ringtile.adaptive import index_topk
from ringtile.integrations.transformers import indexers, use_ringtile
from ringtile.integrations.transformers.attention import attend
from ringtile.integrations.transformers.door import refuse_arguments
from ringtile.integrations.transformers.masks import pairs, pattern_mask
from ringtile.patterns import Causal, Window

TOKENS = 61
KINDS = {"minimax_m3_vl": "right"}
"""How a batch of a family is padded. By default on the left."""
READS_PADDING = {"minimax_m3_vl", "deepseek_v4"}
"""Families whose indexer or compressed keys are made of padding on the left, too."""


@pytest.fixture(autouse=True, scope="module")
def _registered() -> Iterator[None]:
    with registered():
        yield


class Doubled(TorchFunctionMode):
    """Has models compute in float64 what they compute in float32 whatever their dtype: norms, softmax and scores."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        swapped = {name: torch.float64 if x is torch.float32 else x for name, x in (kwargs or {}).items()}
        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(*(torch.float64 if x is torch.float32 else x for x in args), **swapped)


def built(name: str, how: str, dtype: torch.dtype = torch.float64, **change: Any) -> Any:
    made, config = SPARSE[name]()
    for field, value in change.items():
        setattr(config.get_text_config(), field, value)
    torch.manual_seed(0)
    model = made._from_config(config, attn_implementation="ringtile" if how == "name" else "eager")
    # Experts have no float64 otherwise.
    model.set_experts_implementation("eager")
    model = randomized(model).to(dtype)
    return use_ringtile(model) if how == "use_ringtile" else model


both = cache(lambda name, how: (built(name, "eager"), built(name, how)))


@pytest.mark.parametrize(
    ("name", "how", "kind"),
    [
        *(
            (name, "name", KINDS.get(name, ("left", "right", "right", "left")[number % 4]))
            for number, name in enumerate(SPARSE)
        ),
        *((name, "use_ringtile", kind) for name in SPARSE for kind in ("left", "right", "no")[name in KINDS :]),
    ],
)
def test_a_model_computes_what_it_does_with_eager(name: str, how: str, kind: str) -> None:
    tokens, mask = torch.randint(3, 97, (3, TOKENS)), padding(kind)
    inputs = {} if kind == "no" else {"attention_mask": mask.long()}
    models = both(name, how)
    with Doubled():
        assert_equal_models(*models, mask, 1e-10, input_ids=tokens, **inputs)


@pytest.mark.parametrize("name", SPARSE)
def test_a_model_computes_in_float32_what_it_does_with_eager(name: str) -> None:
    """Gradients are compared by module: that of a scale alone is a sum which can nearly vanish."""
    tokens, mask = torch.randint(3, 97, (3, TOKENS)), padding(KINDS.get(name, "left"))
    models = [built(name, how, torch.float32) for how in ("eager", "use_ringtile")]
    first, second = (model(input_ids=tokens, attention_mask=mask.long())[0][mask] for model in models)
    torch.testing.assert_close(second, first, rtol=0, atol=1e-5)
    probe = torch.randn_like(first)
    for out in (first, second):
        (out * probe).sum().backward()
    compared = 0
    for one, other in zip(models[0].modules(), models[1].modules(), strict=True):
        weights = zip(one.parameters(recurse=False), other.parameters(recurse=False), strict=True)
        grads = [(x.grad, y.grad) for x, y in weights if x.grad is not None or y.grad is not None]
        scale = sum(x.square().sum() for x, _ in grads) ** 0.5
        for x, y in grads:
            assert (y - x).norm() <= 1e-5 * scale, type(one).__name__
        compared += len(grads)
    assert compared > 20


def test_the_texts_of_hy_v4_vl_are_those_of_hy_v4() -> None:
    # transformers has it since 5.24.
    module = pytest.importorskip("transformers.models.hy_v4_vl.modeling_hy_v4_vl")
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
    config = SPARSE["hy_v4"]()[1].to_dict() | {"model_type": "hy_v4_vl_text", "rope_parameters": rope}
    torch.manual_seed(0)
    model = module.HYV4VLTextModel._from_config(hf.HYV4VLTextConfig(**config), attn_implementation="eager")
    model.set_experts_implementation("eager")
    eager = randomized(model).double()
    mine, mask = use_ringtile(copy.deepcopy(eager)), padding("left")
    inputs = {"input_ids": torch.randint(3, 97, (3, TOKENS)), "attention_mask": mask.long()}
    with Doubled(), indexers.index_losses(mine) as losses:
        assert_equal_models(eager, mine, mask, 1e-10, **inputs)
    assert len(losses) == 2


def test_a_text_model_may_hand_its_tokens_to_attention() -> None:
    eager, mine = (model.get_decoder() for model in both("glm5_next", "use_ringtile"))
    mask = padding("left")
    inputs = {"input_ids": torch.randint(3, 97, (3, TOKENS)), "attention_mask": mask.long()}
    with Doubled():
        assert_equal_models(eager, mine, mask, 1e-10, **inputs)


def test_padding_on_the_left_is_read_by_some_models() -> None:
    tokens, mask = torch.randint(3, 97, (3, TOKENS)), padding("left")
    other = torch.where(mask, tokens, 5)
    for name in SPARSE:
        model = both(name, "name")[0]
        with torch.no_grad(), Doubled():
            first, second = (model(x, attention_mask=mask.long())[0][mask] for x in (tokens, other))
        assert torch.allclose(first, second, rtol=0, atol=1e-10) == (name not in READS_PADDING), name


@cache
def generated(name: str, how: str, cache: str | None) -> Tensor:
    tokens = torch.randint(3, 97, (3, TOKENS), generator=torch.Generator().manual_seed(0))
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "cache_implementation": cache}
    mask = padding("no" if name in KINDS else "left")
    model = both(name, "use_ringtile")[0] if how == "eager" else both(name, how)[1]
    with Doubled():
        return model.generate(tokens, attention_mask=mask.long(), **options)


@pytest.mark.parametrize(
    ("name", "how", "cache"),
    [
        *((name, how, None) for name in SPARSE for how in ("name", "use_ringtile")),
        *((name, "use_ringtile", "static") for name in SPARSE if name != "deepseek_v4"),
    ],
)
def test_generated_tokens(name: str, how: str, cache: str | None) -> None:
    found = generated(name, how, cache)
    torch.testing.assert_close(found, generated(name, "eager", cache))
    assert found.shape[1] == TOKENS + 6


class Recorded(TorchFunctionMode):
    """Records the scores from which an indexer of transformers chooses."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.__name__ == "topk":
            self.scores = args[0]
        return func(*args, **(kwargs or {}))


LEARNING = ["deepseek_v32", "axk2", "glm_moe_dsa", "mistral_large4", "hy_v4", "dots3_note"]


def divergence(p: Tensor, scores: Tensor) -> Tensor:
    """The mean over rows of the divergence of the softmax of scores from attention p, over the keys that it has."""
    logs = scores.masked_fill(p == 0, -torch.inf).log_softmax(-1).masked_fill(p == 0, 0)
    return (torch.special.entr(p) + p * logs).sum().neg() / p[..., 0].numel()


def compared_gradients(mine: nn.Module, eager: nn.Module, losses: list[Tensor], expected: list[Tensor]) -> int:
    """Compare losses and their gradients, which reach indexers alone. Return how many tensors have one."""
    torch.testing.assert_close(torch.stack(losses), torch.stack(expected), rtol=1e-10, atol=1e-12)
    for loss in (losses, expected):
        sum(loss).backward()  # type: ignore[union-attr]
    compared = 0
    for (label, x), y in zip(mine.named_parameters(), eager.parameters(), strict=True):
        assert (x.grad is None) == (".indexer." not in label), label
        if x.grad is not None:
            torch.testing.assert_close(x.grad, y.grad, rtol=1e-8, atol=1e-12)
            compared += bool(x.grad.any())
    return compared


@pytest.mark.parametrize("warm_up", [True, False])
@pytest.mark.parametrize("name", LEARNING)
def test_losses_of_indexers(name: str, warm_up: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The divergence of eager attention from the softmax of eager scores, and its gradients to the indexers."""
    tokens, mask = torch.randint(3, 97, (3, TOKENS)), padding("left")
    chosen = {"index_topk": TOKENS} if warm_up else {}
    eager, mine = built(name, "eager", **chosen), built(name, "use_ringtile")
    recorded = []
    for module in [*eager.modules(), *mine.modules()]:
        if type(module).__name__.endswith("Attention"):
            # That of attention is not the square root of its width, as with a longer context.
            module.scaling *= 1.3
    for module in eager.modules():
        if type(module).__name__.endswith("Indexer"):

            def forward(*given: Any, of: Any = module, **named: Any) -> Tensor:
                given = tuple(x.detach() if isinstance(x, Tensor) else x for x in given)
                with torch.enable_grad(), Recorded() as scored:
                    found: Tensor = type(of).forward.__wrapped__(of, *given, **named)
                recorded.append(scored.scores.masked_fill(scored.scores < -1e30, -torch.inf))
                return found

            monkeypatch.setattr(module, "forward", forward)
    inputs = {"input_ids": tokens, "attention_mask": mask.long()}
    with Doubled():
        weights = [x for x in eager(**inputs, output_attentions=True).attentions if x is not None]
        with indexers.index_losses(mine, warm_up=warm_up) as losses:
            mine(**inputs)
    # Sinks take a part of the weights, differently for each head. What an indexer learns from is the attention to keys.
    weights = [(x / x.sum(3, keepdim=True)).nan_to_num() for x in weights]
    own = [weights[layer].mean(1).detach() for layer in range(len(weights)) if has_choice(mine, layer)]
    assert len(losses) == len(recorded) == len(own) > 0
    expected = []
    for p, scores in zip(own, recorded, strict=True):
        # A row of padding has no key, and eager attention some weights for it.
        p = p * mask[:, :, None]
        expected.append(divergence(p, scores))
    assert compared_gradients(mine, eager, losses, expected) >= 4 * len(losses)


ALL_CHOSEN = {
    "minimax_m3_vl": {"index_topk_blocks": 99},
    "qwen4_exp": {"indexer_budget": 400},
    "deepseek_v4": {"index_topk": 99},
    "glm5_next": {"index_topk": 400},
}


class Kept(TorchFunctionMode):
    """Records the products of the small heads of MiniMax-M3 (``matmul``) or what is ranked (``topk``)."""

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
    name: str, kept: Kept, weights: Tensor, runs: list[list[tuple[int, int]]]
) -> tuple[Tensor, Tensor]:
    """Scores and what they are to be, ``[B, G, Nq, entries]``, from what eager attention computes."""
    first = first_keys(runs)
    if name == "minimax_m3_vl":
        return kept.products[0] * kept.products[0].new_tensor(16.0) ** -0.5, weights.unflatten(1, (2, -1)).mean(2)
    if name == "deepseek_v4":
        scores, own = kept.ranked[0], weights[..., -kept.ranked[0].shape[2] :]
    else:
        scores = kept.ranked[0]
        if name == "qwen4_exp":
            # The indexer is a loop over queries, of which those without a whole pool in their run rank none.
            begins = [
                [max([begin for begin, _ in row if begin <= i], default=0) for i in range(TOKENS)] for row in runs
            ]
            seen = (first[:, None] >= torch.tensor(begins).unsqueeze(2)) & (first >= 0)[:, None]
            seen &= first[:, None] + 3 <= torch.arange(TOKENS)[:, None]
            scores = torch.full_like(seen, -torch.inf, dtype=torch.float64)
            scores = scores.masked_scatter(seen, torch.cat(kept.ranked))
        own = sum(_at(weights, first + i) for i in range(4))  # type: ignore[assignment]
    own = own.masked_fill((scores < -1e30).unsqueeze(1), 0)
    own = (own / own.sum(3, keepdim=True)).nan_to_num(0)
    return scores.unsqueeze(1), own.mean(1, keepdim=True)


def _at(weights: Tensor, key: Tensor) -> Tensor:
    """The weights of one key of each pool, ``[B, H, Nq, pools]``."""
    index = key.clamp(min=0)[:, None, None].expand(*weights.shape[:3], -1)
    return weights.gather(3, index)


@pytest.mark.parametrize("warm_up", [True, False])
@pytest.mark.parametrize(
    ("name", "kind"),
    [("minimax_m3_vl", "no"), ("deepseek_v4", "no"), ("glm5_next", "left"), ("qwen4_exp", "left"),
     ("qwen4_exp", "packed")],
)  # fmt: skip
def test_losses_of_other_indexers(name: str, kind: str, warm_up: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The attention that eager heads pay to keys, pools and compressed keys, and the gradients to the indexers."""
    tokens, mask = torch.randint(3, 97, (3, TOKENS)), padding("no" if kind == "packed" else kind)
    inputs = {"input_ids": tokens, "attention_mask": mask.long()}
    runs = [[(int(row.long().argmax()), TOKENS)] for row in mask]
    if kind == "packed":
        places = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in ([30, 1, 30], [7, 54], [61])])
        inputs = {"input_ids": tokens, "position_ids": places, "use_cache": False}
        runs = [[(0, 30), (30, 31), (31, 61)], [(0, 7), (7, 61)], [(0, 61)]]
    eager, mine = built(name, "eager", **(ALL_CHOSEN[name] if warm_up else {})), built(name, "use_ringtile")
    recorded, weights = [], []
    for label, module in eager.named_modules():
        if label.endswith(".indexer"):

            def forward(*given: Any, of: Any = module, **named: Any) -> Tensor:
                given = tuple(x.detach() if isinstance(x, Tensor) else x for x in given)
                named = {key: x.detach() if isinstance(x, Tensor) else x for key, x in named.items()}
                own = type(of).forward
                with torch.enable_grad(), Kept() as kept:
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
    torch.testing.assert_close(outputs[1][mask], outputs[0][mask], rtol=0, atol=1e-10)
    assert len(losses) == len(recorded) == len(weights) > 0
    expected = []
    for kept, own in zip(recorded, weights, strict=True):
        # A row without keys has weights in eager attention, for padding too.
        wrong = (own[..., :TOKENS] * ~mask[:, None, None]).any(3, keepdim=True)
        scores, p = scores_and_attention(name, kept, own.masked_fill(wrong, 0), runs)
        expected.append(divergence(p, scores))
    assert min(expected) > 1e-3
    assert compared_gradients(mine, eager, losses, expected) >= 3 * len(losses)


def has_choice(model: nn.Module, layer: int) -> bool:
    return any(label.endswith(f"layers.{layer}.self_attn.indexer") for label, _ in model.named_modules())


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
    for wrong in (built("deepseek_v4", "use_ringtile", **none), built("deepseek_v32", "name")):
        with pytest.raises(ValueError, match="model: expected indexers that choose"), indexers.index_losses(wrong):
            pass
    with pytest.raises(ValueError, match="rows"), indexers.index_losses(model, rows=0):
        pass


@pytest.mark.parametrize("warm_up", [True, False])
@pytest.mark.parametrize("name", [name for name in SPARSE if name != "deepseek_v4"])
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
    eager, mine = both(name, "use_ringtile")
    with torch.no_grad(), Doubled():
        torch.testing.assert_close(mine(tokens)[0], eager(tokens)[0], rtol=0, atol=1e-10)
        for warm_up in (True, False):
            with indexers.index_losses(mine, warm_up=warm_up) as losses:
                mine(tokens)
            assert [float(loss) for loss in losses] == [0.0]


@pytest.mark.parametrize("name", [name for name in SPARSE if name not in KINDS])
def test_packed_rows(name: str) -> None:
    places = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in ([30, 1, 30], [7, 54])])
    inputs = {"input_ids": torch.randint(3, 97, places.shape), "position_ids": places, "use_cache": False}
    models = both(name, "use_ringtile")
    with torch.no_grad(), Doubled():
        first, second = (model(**inputs)[0] for model in models)
    torch.testing.assert_close(second, first, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["glm_moe_dsa", "minimax_m3_vl"])
def test_checkpoints_choose_again(name: str) -> None:
    tokens, grads = torch.randint(3, 97, (2, TOKENS)), []
    for checkpointed in (False, True):
        model = built(name, "use_ringtile", torch.float32).train()
        if checkpointed:
            model.activation_checkpointing_enable()
        model(tokens, use_cache=False)[0].square().mean().backward()
        grads.append([weight.grad for weight in model.parameters() if weight.grad is not None])
    torch.testing.assert_close(grads[1], grads[0], rtol=0, atol=0)


@pytest.mark.parametrize("name", SPARSE)
def test_the_future_changes_nothing_and_the_choice_something(name: str) -> None:
    tokens = torch.randint(3, 97, (2, TOKENS))
    later = torch.cat([tokens[:, :40], torch.randint(3, 97, (2, TOKENS - 40))], 1)
    model = both(name, "use_ringtile")[1]
    others = built(name, "use_ringtile", **ALL_CHOSEN.get(name, {"index_topk": 400}))
    with torch.no_grad(), Doubled():
        first, second, of_all = (x.double() for x in (model(tokens)[0], model(later)[0], others(tokens)[0]))
    torch.testing.assert_close(second[:, :40], first[:, :40], rtol=0, atol=1e-12)
    assert (second - first)[:, 40:].abs().max() > 0.1
    assert (of_all - first)[:, 40:].abs().max() > 1e-3


@pytest.mark.parametrize("name", SPARSE)
def test_copies_and_pickles_choose_as_the_model(name: str) -> None:
    tokens = torch.randint(3, 97, (1, TOKENS))
    model = built(name, "use_ringtile")
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        choosing = [(x, name) for x in other.modules() for name in indexers.INDEXERS.get(type(x).__name__, ())]
        assert choosing
        assert all(module.__dict__[name].args[-1] is module for module, name in choosing)
        with torch.no_grad(), Doubled():
            torch.testing.assert_close(other(tokens)[0], model(tokens)[0])
    # Switched back, it is the model that it was.
    model.set_attn_implementation("eager")
    eager = both(name, "use_ringtile")[0]
    with torch.no_grad(), Doubled():
        torch.testing.assert_close(model(tokens)[0], eager(tokens)[0], rtol=0, atol=0)


@pytest.mark.parametrize("name", [name for name in SPARSE if name != "qwen4_exp"])
def test_indexers_choose_in_chunks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(*given: Any, **named: Any) -> Tensor:
        calls.append(given)
        return index_topk(*given, **named)

    monkeypatch.setattr(indexers, "index_topk", counted)
    model = both(name, "use_ringtile")[1]
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
    with pytest.raises(ValueError, match=r"^indexer: expected the scores of DeepSeek-V3.2's, got softmax"):
        indexers._choose_tokens(Softmaxed(), query, key, mask)


def test_a_pattern_limits_the_choice() -> None:
    query, key, value = torch.randn(3, 1, 4, 20, 8, dtype=torch.float64)
    indices = torch.rand(1, 20, 20).topk(6).indices.masked_fill(torch.rand(1, 20, 6) < 0.2, -1).int()
    chosen = torch.zeros(1, 20, 21, dtype=torch.bool).scatter(2, indices.long() % 21, True)[..., :20]
    kept = chosen & pairs(Causal() & Window(9), 0, 20, 20, torch.device("cpu"))
    found = attend(Window(9), nn.Module(), query, key, value, None, indices=indices)[0].transpose(1, 2)
    scores = (query @ key.mT / 8**0.5).masked_fill(~kept, -torch.inf)
    torch.testing.assert_close(found, scores.softmax(3).nan_to_num(0) @ value, rtol=0, atol=1e-12)


def test_shards_refuse_a_choice() -> None:
    with pytest.raises(ValueError, match=r"^indices: ringtile does not support keys chosen by an indexer"):
        refuse_arguments({"indices": torch.zeros(1, 5, 2)})


class Largest(TorchDispatchMode):
    """The size of the largest storage that operations return, in elements of four bytes."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                self.most = max(self.most, x.untyped_storage().nbytes() // 4)
        return out


@pytest.mark.parametrize("name", SPARSE)
def test_no_tensor_has_all_pairs(name: str) -> None:
    most = {}
    # Linear attention has larger tensors than these, in proportion to the tokens.
    kinds = {"layer_types": ["indexed_attention"] * 3} if name == "glm5_next" else {}
    # Of eager attention, which takes seconds where it is long, it is enough to see that such a tensor is found.
    for how, n in (("use_ringtile", 2200), ("eager", 600)):
        model = built(name, how, torch.float32, max_position_embeddings=4096, **kinds)
        with torch.no_grad(), Largest() as largest:
            model(torch.randint(3, 97, (1, n)))
        most[how] = largest.most
    assert most["use_ringtile"] < 2200 * 2200
    assert most["eager"] >= 2 * 600 * 600
