"""Transformer layers: against plain torch operations in float64, and everything that may be asked of a module."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import kept_pairs, relative_error
from torch import Tensor, nn
from torch._dynamo.utils import counters

from ringtile.functional import dilated_attention, sparse_attention
from ringtile.modules.language_model import SparseLanguageModel
from ringtile.modules.longnet import longnet_attend
from ringtile.modules.positions import rotary_angles
from ringtile.modules.transformer import SparseTransformer, SparseTransformerLayer
from ringtile.patterns import Causal, Dense, GlobalTokens, Pattern, Strided, Window, from_mask, per_head

RULE = Window(9) | GlobalTokens(3)
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def scrambled(module: nn.Module) -> Any:
    """The same module with no zeros or ones left in its weights."""
    for weight in module.parameters():
        nn.init.normal_(weight, std=0.3 if weight.dim() == 2 else 1.0)
    return module


def turned(x: Tensor) -> Tensor:
    """Rotary positions as a product of complex numbers."""
    half = x.shape[-1] // 2
    rates = 1 / 10000.0 ** (torch.arange(half, dtype=torch.float64) / half)
    turns = torch.polar(torch.ones(()).double(), torch.outer(torch.arange(x.shape[-2]).double(), rates))
    pairs = torch.complex(x[..., :half], x[..., half:]) * turns
    return torch.cat([pairs.real, pairs.imag], -1)


def normed(x: Tensor, weight: Tensor | float = 1.0) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + torch.finfo(x.dtype).eps).sqrt() * weight


def plain_layer(
    x: Tensor, weights: dict[str, Tensor], layer: SparseTransformerLayer, attention: Attention | None = None
) -> Tensor:
    """A layer out of plain operations, dense where no attention is given."""
    heads, kv_heads, head_dim = layer.num_heads, layer.num_kv_heads, layer.head_dim
    y = normed(x, weights["attention_norm.weight"]) @ weights["qkv.weight"].T
    q, k, v = (
        part.unflatten(-1, (-1, head_dim)).transpose(1, 2)
        for part in y.split([heads * head_dim, kv_heads * head_dim, kv_heads * head_dim], -1)
    )
    if layer.qk_norm:
        q, k = normed(q), normed(k)
    if layer.rotary:
        q, k = turned(q), turned(k)
    k, v = (part.repeat_interleave(heads // kv_heads, 1) for part in (k, v))
    mixed = (attention or (lambda q, k, v: (q @ k.mT / head_dim**0.5).softmax(-1) @ v))(q, k, v)
    x = x + mixed.transpose(1, 2).flatten(2) @ weights["output.weight"].T
    hidden = normed(x, weights["mlp_norm.weight"]) @ weights["up.weight"].T
    cube = hidden + 0.044715 * hidden**3
    gelu = 0.5 * hidden * (1 + torch.tanh((2 / torch.pi) ** 0.5 * cube))
    return x + gelu @ weights["down.weight"].T


def masked(rule: Pattern, key_mask: Tensor | None) -> Attention:
    """Dense attention over the pairs of a rule; a query without any gets zero."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kept = kept_pairs(rule, q, k, key_mask=key_mask)
        weights = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~kept, -torch.inf).softmax(-1)
        return torch.where(kept, weights, 0) @ v

    return attention


def gradients(out: Tensor, x: Tensor, weights: dict[str, Tensor], grad: Tensor) -> dict[str, Tensor]:
    leaves = {"x": x, **weights}
    return dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), grad), strict=True))


@pytest.mark.parametrize("n_tokens", [1, 45])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True, "pattern": RULE, "num_kv_heads": 2, "hidden_dim": 24, "qk_norm": True},
        {"is_causal": True, "pattern": per_head([Window(3), Dense(), Strided(5), RULE]), "rotary": False},
        {"pattern": ~Window(20), "num_kv_heads": 1, "masked": True},
    ],
    ids=repr,
)
def test_a_layer_is_its_formula(options: dict[str, Any], n_tokens: int) -> None:
    key_mask = torch.rand(2, n_tokens) < 0.7 if options.get("masked") else None
    options = {name: value for name, value in options.items() if name != "masked"}
    layer = scrambled(SparseTransformerLayer(32, 4, dtype=torch.float64, **options))
    x, grad = torch.randn(2, 2, n_tokens, 32, dtype=torch.float64).unbind()
    x.requires_grad_()
    weights = dict(layer.named_parameters())
    out = layer(x, key_mask)
    expected = plain_layer(x, weights, layer, masked(layer.rule, key_mask))
    assert relative_error(out, expected) < 1e-13
    actual, wanted = (gradients(y, x, weights, grad) for y in (out, expected))
    assert len(wanted) == 7
    for name in wanted:
        assert relative_error(actual[name], wanted[name]) < 1e-12, name


def test_a_fresh_layer_is_the_identity_and_learns() -> None:
    layer = SparseTransformerLayer(32, 4, pattern=RULE)
    x = torch.randn(2, 20, 32)
    assert torch.equal(layer(x), x)
    layer(x).square().sum().backward()
    for name in ("output", "down"):
        assert bool(getattr(layer, name).weight.grad.any()), name


def test_a_stack_is_its_layers_and_a_norm() -> None:
    rules = [Window(4), None, Strided(6)]
    stack = scrambled(SparseTransformer(3, 32, 4, is_causal=True, pattern=rules, dtype=torch.float64))
    assert [layer.pattern for layer in stack.layers] == rules
    x = torch.randn(2, 70, 32, dtype=torch.float64)
    key_mask = torch.rand(2, 70) < 0.8
    y = x
    for layer in stack.layers:
        y = plain_layer(y, dict(layer.named_parameters()), layer, masked(layer.rule, key_mask))
    assert relative_error(stack(x, key_mask), normed(y, stack.norm.weight)) < 1e-13
    same = SparseTransformer(3, 32, 4, pattern=RULE)
    assert [layer.pattern for layer in same.layers] == [RULE] * 3


# LongNet


def test_longnet_attends_by_its_branches() -> None:
    q, k, v = torch.randn(3, 1, 3, 60, 8).unbind()
    for overlap in ((), ("mix",), ("union",)):
        out = longnet_attend([16, 48], [1, 3], *overlap)(q, k, v, pattern=None, is_causal=True, key_mask=None)
        how = {"is_causal": True, "overlap": (*overlap, "mix")[0]}
        assert torch.equal(out, dilated_attention(q, k, v, [16, 48], [1, 3], **how))


# What is handed to attend, and dropout


def test_what_attend_is_called_with() -> None:
    calls: list[dict[str, Any]] = []

    def attend(query: Tensor, key: Tensor, value: Tensor, **others: Any) -> Tensor:
        calls.append({"shapes": [tuple(x.shape) for x in (query, key, value)], **others})
        return query

    key_mask = torch.ones(2, 9, dtype=torch.bool)
    layer = SparseTransformerLayer(32, 4, attend=attend, pattern=RULE, is_causal=True, dropout=0.25)
    layer(torch.randn(2, 9, 32), key_mask)
    assert calls.pop() == {
        "shapes": [(2, 4, 9, 8)] * 3,
        "pattern": RULE,
        "is_causal": True,
        "key_mask": key_mask,
        "dropout_p": 0.25,
    }
    SparseTransformerLayer(32, 4, num_kv_heads=2, attend=attend, dropout=0.25).eval()(torch.randn(2, 9, 32))
    assert calls.pop() == {
        "shapes": [(2, 4, 9, 8), (2, 2, 9, 8), (2, 2, 9, 8)],
        "pattern": None,
        "is_causal": False,
        "key_mask": None,
        "dropout_p": 0.0,
        "enable_gqa": True,
    }


@pytest.mark.parametrize("branch", ["output", "down"])
def test_dropout_takes_elements_of_both_outputs(branch: str) -> None:
    layer = scrambled(SparseTransformerLayer(64, 4, dropout=0.25, attend=lambda q, k, v, **_: v))
    other = "down" if branch == "output" else "output"
    nn.init.zeros_(getattr(layer, other).weight)
    x = torch.randn(4, 100, 64)
    whole, dropped = layer.eval()(x) - x, layer.train()(x) - x
    gone = dropped == 0
    assert 0.23 < float(gone.float().mean()) < 0.27
    torch.testing.assert_close(dropped[~gone], whole[~gone] / 0.75, rtol=1e-3, atol=1e-3)


# Gradient checkpointing


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_checkpointed_gradients_are_the_same_bits(dropout: float) -> None:
    stack = scrambled(SparseTransformer(3, 32, 4, pattern=RULE, is_causal=True, dropout=dropout))
    x, key_mask = torch.randn(2, 60, 32), torch.rand(2, 60) < 0.8
    found = []
    for checkpointing in (False, True):
        stack.gradient_checkpointing = checkpointing
        torch.manual_seed(5)
        leaf = x.clone().requires_grad_()
        out = stack(leaf, key_mask)
        found.append([out, *torch.autograd.grad(out.square().sum(), [leaf, *stack.parameters()])])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_checkpointing_saves_inputs_and_calls_each_layer_twice() -> None:
    stack = scrambled(SparseTransformer(4, 32, 4, pattern=RULE))
    calls: list[nn.Module] = []
    for layer in stack.layers:
        layer.register_forward_pre_hook(lambda layer, _: calls.append(layer))
    saved = []
    for checkpointing, expected in ((False, 4), (True, 8)):
        stack.gradient_checkpointing = checkpointing
        total: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, total=total: total.append(x.nbytes) or x, lambda x: x):
            out = stack(torch.randn(1, 256, 32, requires_grad=True))
        saved.append(sum(total))
        out.sum().backward()
        assert len(calls) == expected
        calls.clear()
    assert saved[1] < saved[0] / 5
    with torch.no_grad():
        stack(torch.randn(1, 8, 32))
    assert len(calls) == 4
    assert "gradient_checkpointing=True" in repr(stack)


def test_a_layer_that_fails_under_checkpointing_leaves_autograd_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    stack = SparseTransformer(2, 32, 4, is_causal=True, gradient_checkpointing=True)
    x = torch.randn(1, 20, 32, requires_grad=True)
    with monkeypatch.context() as patch:
        patch.setattr(stack.layers[1], "forward", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            stack(x)
    (grad,) = torch.autograd.grad((x * x).sum(), x)
    assert torch.equal(grad, 2 * x)
    stack.gradient_checkpointing = False
    (expected,) = torch.autograd.grad(stack(x).sum(), x)
    stack.gradient_checkpointing = True
    (grad,) = torch.autograd.grad(stack(x).sum(), x)
    assert torch.equal(grad, expected)


# Positions


def test_rotary_angles_of_known_positions() -> None:
    cos, sin = rotary_angles(3, 4, start=5, base=100.0, like=torch.empty(0, dtype=torch.float64))
    expected = torch.tensor([[5.0, 0.5], [6.0, 0.6], [7.0, 0.7]], dtype=torch.float64)
    torch.testing.assert_close(cos, expected.cos(), rtol=0, atol=1e-15)
    torch.testing.assert_close(sin, expected.sin(), rtol=0, atol=1e-15)


def test_rotary_angles_of_any_positions() -> None:
    like = torch.empty(0, dtype=torch.float64)
    positions = torch.tensor([[5, 2**20, 0], [7, 7, 6]])
    found = rotary_angles(3, 8, positions=positions, like=like)
    for row, places in enumerate(positions.tolist()):
        alone = [rotary_angles(1, 8, start=place, like=like) for place in places]
        for one, whole in zip(zip(*alone, strict=True), found, strict=True):
            assert torch.equal(torch.cat(one), whole[row])
    assert torch.equal(rotary_angles(3, 8, positions=positions[0], like=like)[1], found[1][0])


def test_permuted_tokens_with_their_positions_and_pattern_give_permuted_outputs() -> None:
    n, order = 90, torch.randperm(90)
    shared = dict(num_layers=2, embed_dim=32, num_heads=4, num_kv_heads=2, qk_norm=True)
    model = scrambled(SparseTransformer(**shared, is_causal=True, pattern=RULE).double())
    kept = kept_pairs(Causal() & RULE, torch.empty(1, 4, n, 8), torch.empty(1, 4, n, 8))[0, 0]
    permuted = from_mask(kept[order][:, order])

    def attend(q: Tensor, k: Tensor, v: Tensor, *, pattern: Pattern | None, is_causal: bool, **options: Any) -> Tensor:
        out = sparse_attention(q, k, v, permuted, **options)
        assert isinstance(out, Tensor)
        return out

    shuffled = SparseTransformer(**shared, attend=attend).double()
    shuffled.load_state_dict(model.state_dict())
    x = torch.randn(2, n, 32, dtype=torch.float64)
    expected = model(x)[:, order]
    assert relative_error(shuffled(x[:, order], positions=order), expected) < 1e-12
    assert relative_error(shuffled(x[:, order]), expected) > 1e-3
    # A batch with a permutation for each element.
    half = torch.stack([order, torch.arange(n)])
    mixed = torch.stack([x[0][order], x[1]])
    layer = SparseTransformerLayer(32, 4, num_kv_heads=2).double()
    scrambled(layer)
    found = layer(mixed, positions=half)
    whole = layer(x)
    assert relative_error(found[0], whole[0][order]) < 1e-12
    assert relative_error(found[1], whole[1]) < 1e-12


def test_a_language_model_takes_positions() -> None:
    model = scrambled(SparseLanguageModel(20, SparseTransformer(1, 16, 2, is_causal=True)))
    tokens = torch.randint(20, (2, 9))
    shifted = torch.arange(9) * 2
    assert torch.equal(model(tokens, positions=torch.arange(9)), model(tokens))
    assert not torch.allclose(model(tokens, positions=shifted), model(tokens))


def test_positions_that_do_not_fit_are_refused() -> None:
    model = SparseTransformer(1, 16, 2, is_causal=True)
    plain = SparseTransformer(1, 16, 2, is_causal=True, rotary=False)
    x, places = torch.randn(3, 9, 16), torch.arange(9)
    layer, size = model.layers[0], r"positions: expected int64 \[N\] or \[B, N\] of 9 tokens"
    for call, positions, options, words in (
        *((model, bad, {}, size) for bad in (places[:8], places.expand(1, 3, 9), places.int(), torch.tensor(3))),
        (model, places.expand(2, 9), {}, r"positions: expected rotary=True and \[N\] or \[B, N\] of x.shape"),
        (plain, places, {}, "positions: expected rotary=True .*self.rotary=False"),
        (model, places.to("meta"), {}, "positions: expected a tensor on cpu, got meta"),
        (model.eval(), places, {"cache": model.new_cache()}, "positions: expected none beside a cache"),
        (layer, places, {"cache": layer.new_cache()}, "positions: expected neither a cache"),
        (layer, places, {"angles": layer.angles(x)}, "positions: expected neither a cache"),
    ):
        with pytest.raises(ValueError, match=words):
            call(x, positions=positions, **options)
    with pytest.raises(ValueError, match="positions: expected none beside a start, got start=4"):
        rotary_angles(9, 8, start=4, positions=places, like=x)
    with pytest.raises(ValueError, match=r"head_dim: .*head_dim=3"):
        rotary_angles(4, 3, like=torch.empty(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary_angles_are_right_far_away(dtype: torch.dtype) -> None:
    exact = rotary_angles(50, 64, start=2**20 - 3, like=torch.empty(0, dtype=torch.float64))
    single = rotary_angles(50, 64, start=2**20 - 3, like=torch.empty(0, dtype=dtype))
    for one, other in zip(exact, single, strict=True):
        assert other.dtype == torch.float32
        torch.testing.assert_close(other.double(), one, rtol=0, atol=1e-6)


# As a module


def model() -> SparseLanguageModel:
    stack = SparseTransformer(2, 32, 4, num_kv_heads=2, is_causal=True, pattern=RULE, qk_norm=True)
    built: SparseLanguageModel = scrambled(SparseLanguageModel(50, stack))
    return built


def test_a_state_dict_goes_round() -> None:
    one, other = model(), model()
    layer = ["attention_norm", "qkv", "output", "mlp_norm", "up", "down"]
    names = [f"transformer.layers.{n}.{part}.weight" for n in (0, 1) for part in layer]
    assert list(one.state_dict()) == ["embedding.weight", *names, "transformer.norm.weight", "head.weight"]
    file = io.BytesIO()
    torch.save(one.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    tokens = torch.randint(50, (2, 40))
    assert torch.equal(one(tokens), other(tokens))


def test_copies_and_pickles_compute_the_same() -> None:
    one = model()
    file = io.BytesIO()
    torch.save(one, file)
    file.seek(0)
    tokens = torch.randint(50, (2, 40))
    for other in (copy.deepcopy(one), torch.load(file, weights_only=False)):
        assert torch.equal(one(tokens), other(tokens))
        assert other.transformer.layers[0].pattern == RULE
        nn.init.zeros_(other.head.weight)
    assert bool(one.head.weight.any())
    fork = copy.deepcopy(SparseTransformer(1, 32, 4, attend=longnet_attend([8, 16], [1, 2])))
    assert fork(torch.randn(1, 20, 32)).shape == (1, 20, 32)


# Dynamo's own way to trace an autograd function.
@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")
def test_one_compiled_graph_serves_all_lengths() -> None:
    torch._dynamo.reset()
    counters.clear()
    stack = scrambled(SparseTransformer(1, 32, 4, is_causal=True, pattern=RULE, gradient_checkpointing=True))
    compiled = torch.compile(stack, fullgraph=True, dynamic=True, backend="eager")
    for n_tokens in (40, 57, 130):
        x = torch.randn(2, n_tokens, 32)
        found = []
        for called in (stack, compiled):
            out = called(x)
            found.append([out, *torch.autograd.grad(out.square().sum(), list(stack.parameters()))])
        for expected, actual in zip(*found, strict=True):
            assert relative_error(actual, expected) < 1e-5
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types(dtype: torch.dtype) -> None:
    stack = SparseTransformer(2, 32, 4, is_causal=True, pattern=RULE, qk_norm=True, dtype=dtype)
    assert {weight.dtype for weight in stack.parameters()} == {dtype}
    scrambled(stack)
    x = torch.randn(1, 50, 32, dtype=dtype)
    out = stack(x)
    assert out.dtype == dtype
    exact = copy.deepcopy(stack).double()(x.double())
    assert relative_error(out, exact) < 10 * torch.finfo(dtype).eps


@pytest.mark.parametrize(("qk_norm", "wider_norm"), [(False, False), (True, True)])
def test_autocast(qk_norm: bool, wider_norm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    norm = F.rms_norm
    if wider_norm:
        # As autocast has it on some devices.
        monkeypatch.setattr(F, "rms_norm", lambda x, *rest: norm(x.float(), *rest))
    stack = scrambled(SparseTransformer(2, 32, 4, is_causal=True, pattern=RULE, qk_norm=qk_norm))
    x = torch.randn(1, 50, 32)
    with torch.autocast("cpu", torch.bfloat16):
        out = stack(x)
    assert 1e-5 < relative_error(out, stack(x)) < 0.05
    out.sum().backward()
    assert all(weight.grad.dtype == torch.float32 for weight in stack.parameters())


def test_device_and_dtype_reach_every_parameter() -> None:
    stack = SparseTransformer(1, 32, 4, is_causal=True, device="meta", dtype=torch.float16)
    built = SparseLanguageModel(50, stack)
    assert {(str(w.device), w.dtype) for w in built.parameters()} == {("meta", torch.float16)}


@pytest.mark.parametrize(
    ("arguments", "options", "complaint"),
    [
        ((0, 4), {}, "embed_dim: .*0"),
        ((32, 4.0), {}, r"num_heads: .*4\.0"),
        ((32, 4), {"num_kv_heads": 3}, "num_kv_heads: .*num_kv_heads=3"),
        ((32, 4), {"num_kv_heads": 0}, "num_kv_heads: .*0"),
        ((32, 4), {"hidden_dim": -1}, "hidden_dim: .*-1"),
        ((32, 3), {"rotary": False}, "embed_dim: expected a multiple .*embed_dim=32, num_heads=3"),
        ((12, 4), {}, "embed_dim: expected an even multiple .*embed_dim=12"),
        ((32, 4), {"dropout": 1.0}, r"dropout: .*1\.0"),
        ((32, 4), {"dropout": -0.1}, r"dropout: .*-0\.1"),
        ((32, 4), {"pattern": "windw(3)"}, "pattern: unknown pattern .windw"),
        ((32, 4), {"pattern": per_head([Window(1), Window(2)])}, "pattern: .*2 heads.*num_heads=4"),
    ],
)
def test_bad_sizes_are_named(arguments: tuple[Any, ...], options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        SparseTransformerLayer(*arguments, **options)


def test_bad_stacks_and_inputs_are_named() -> None:
    with pytest.raises(ValueError, match=r"num_layers: .*0"):
        SparseTransformer(0, 32, 4)
    with pytest.raises(ValueError, match=r"pattern: .*num_layers=3.*got 2"):
        SparseTransformer(3, 32, 4, pattern=[RULE, RULE])
    stack = SparseTransformer(1, 32, 4)
    for shape in ((10, 32), (1, 10, 31), (1, 1, 10, 32)):
        for called in (stack, stack.layers[0]):
            with pytest.raises(ValueError, match=r"x: expected \[B, N, 32\], got x\.shape"):
                called(torch.randn(shape))
    with pytest.raises(ValueError, match="key_mask"):
        stack(torch.randn(1, 10, 32), torch.ones(1, 9, dtype=torch.bool))
