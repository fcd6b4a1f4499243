"""SparseMultiheadAttention against torch.nn.MultiheadAttention in float64: results, gradients, masks, checkpoints."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import ref

import pytest
import torch
from oracle import relative_error
from pairs import all_pairs
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from ringtile.functional import sparse_attention
from ringtile.index import build_index, cache_info, clear_cache, to_block_mask
from ringtile.kernels.reference import attention_reference
from ringtile.modules import SparseMultiheadAttention, SparseTransformer, multihead, replace_attention
from ringtile.patterns import Blocks, Causal, Dense, GlobalTokens, Pattern, Window, from_mask, per_head

E, H = 24, 4
EXACT = 1e-12
LOCAL = Causal() & (Window(5) | GlobalTokens(2))
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no bias": {"bias": False},
    "batch first": {"batch_first": True},
    "widths": {"kdim": 10, "vdim": 7},
    "widths without bias": {"kdim": 10, "bias": False},
    "bias_kv": {"add_bias_kv": True},
    "zero_attn": {"add_zero_attn": True},
    "all of it": {"add_bias_kv": True, "add_zero_attn": True, "vdim": 9, "batch_first": True},
}


def modules(variant: str, **ours: Any) -> tuple[SparseMultiheadAttention, nn.MultiheadAttention]:
    """Ours and torch's in float64 with the same random parameters."""
    theirs = nn.MultiheadAttention(E, H, **VARIANTS[variant], dtype=torch.float64)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.4)
    module = SparseMultiheadAttention(E, H, **VARIANTS[variant], dtype=torch.float64, **ours)
    module.load_state_dict(theirs.state_dict())
    return module, theirs


def inputs(module: nn.MultiheadAttention, batch: int, n_queries: int, n_keys: int, kind: str = "cross") -> list[Tensor]:
    """Query, key and value; of ``kind`` "self" one tensor, "memory" two of which key and value are the same."""

    def tensor(length: int, width: int) -> Tensor:
        shape = (batch, length, width) if module.batch_first else (length, batch, width)
        return torch.randn(shape, dtype=torch.float64).requires_grad_()

    query = tensor(n_queries, E)
    if kind == "self":
        return [query, query, query]
    key = tensor(n_keys, module.kdim)
    return [query, key, key if kind == "memory" else tensor(n_keys, module.vdim)]


def masks_named(name: str, batch: int, n_queries: int, n_keys: int) -> dict[str, Any]:
    """Mask arguments that leave each row its last keys, so that torch's rows are never empty."""
    padding = torch.rand(batch, n_keys) < 0.3
    padding[:, -1] = False
    dropped = torch.rand(n_queries, n_keys) < 0.4
    dropped[:, -1] = False
    per_head_mask = torch.rand(batch * H, n_queries, n_keys) < 0.4
    per_head_mask[:, :, -1] = False
    minus_inf = torch.zeros(n_queries, n_keys, dtype=torch.float64).masked_fill(dropped, -torch.inf)
    bias = torch.randn(batch, n_keys, dtype=torch.float64).masked_fill(padding, -torch.inf)
    return {
        "none": {},
        "padding": {"key_padding_mask": padding},
        "padding bias": {"key_padding_mask": bias},
        "dropped": {"attn_mask": dropped},
        "dropped as floats": {"attn_mask": minus_inf},
        "dropped per head": {"attn_mask": per_head_mask},
        "dropped and padding": {"attn_mask": dropped, "key_padding_mask": padding},
        "floats and padding bias": {"attn_mask": minus_inf, "key_padding_mask": bias},
        "causal hint": {
            "attn_mask": nn.Transformer.generate_square_subsequent_mask(n_queries, dtype=torch.float64),
            "is_causal": True,
        },
    }[name]


MASKS = (
    "none; padding; padding bias; dropped; dropped as floats; dropped per head; dropped and padding; "
    "floats and padding bias; causal hint"
).split("; ")


def gradients(module: nn.Module, given: list[Tensor], outputs: list[Tensor]) -> dict[str, Tensor]:
    """Gradients of all parameters and inputs of a random projection of the outputs."""
    generator = torch.Generator().manual_seed(7)
    leaves = dict(module.named_parameters()) | {f"input {id(x)}": x for x in given}
    cotangents = [torch.randn(out.shape, generator=generator, dtype=out.dtype) for out in outputs]
    grads = torch.autograd.grad(outputs, list(leaves.values()), cotangents, allow_unused=True, materialize_grads=True)
    return dict(zip(leaves, grads, strict=True))


def assert_same(
    ours: SparseMultiheadAttention,
    theirs: nn.MultiheadAttention,
    given: list[Tensor],
    arguments: dict[str, Any],
    their_arguments: dict[str, Any] | None = None,
    tolerance: float = EXACT,
) -> None:
    """Outputs, weights, whether asked for or not, and gradients of both are equal."""
    their_arguments = arguments if their_arguments is None else their_arguments
    for weights in ({"need_weights": False}, {}, {"average_attn_weights": False}):
        actual, expected = ours(*given, **arguments, **weights), theirs(*given, **their_arguments, **weights)
        assert len(actual) == 2
        assert (actual[1] is None) == (expected[1] is None) == (weights.get("need_weights") is False)
        pairs = [(a, e) for a, e in zip(actual, expected, strict=True) if e is not None]
        for a, e in pairs:
            assert relative_error(a, e) < tolerance
        outs = zip(*pairs, strict=True)
        found, wanted = (gradients(m, given, list(next(outs))) for m in (ours, theirs))
        assert found.keys() == wanted.keys()
        for name, grad in wanted.items():
            # With a single key a query's gradient is zero, and what either finds of it the rounding of its terms.
            nothing = max(found[name].abs().max(), grad.abs().max()) < 1e-14
            assert nothing or relative_error(found[name], grad) < tolerance, name


def elsewhere(*args: Any, **kwargs: Any) -> Any:
    """Another function than `sparse_attention`, so that nothing is left to torch's own."""
    return sparse_attention(*args, **kwargs)


@pytest.mark.parametrize(
    ("variant", "name", "attend"),
    [*all_pairs(list(VARIANTS), MASKS, [sparse_attention, elsewhere]), ("plain", "padding bias", elsewhere)],
)
def test_without_a_pattern_it_is_torchs(variant: str, name: str, attend: Callable[..., Any]) -> None:
    ours, theirs = modules(variant, attend=attend)
    length = 9 if name == "causal hint" else 11
    assert_same(ours, theirs, inputs(ours, 3, 9, length), masks_named(name, 3, 9, length))


def test_without_a_pattern_any_floating_mask_is_added_and_learned() -> None:
    ours, theirs = modules("plain", pattern=Dense())
    mask = torch.randn(9, 11, dtype=torch.float64, requires_grad=True)
    assert_same(ours, theirs, inputs(ours, 2, 9, 11), {"attn_mask": mask})
    given = inputs(ours, 2, 9, 11)
    grads = [torch.autograd.grad(m(*given, attn_mask=mask)[0].square().sum(), mask)[0] for m in (ours, theirs)]
    assert relative_error(*grads) < EXACT


@pytest.mark.parametrize("times", [1.0, 0.0])
def test_the_bias_of_a_key_is_learned(times: float) -> None:
    ours, theirs = modules("plain", pattern=Causal())
    given = inputs(ours, 2, 9, 9)
    bias = masks_named("padding bias", 2, 9, 9)["key_padding_mask"]
    bias[:, 0] = 0.0
    bias = torch.where(bias.isinf(), bias, times * bias).requires_grad_()
    mask = nn.Transformer.generate_square_subsequent_mask(9, dtype=torch.float64)
    ours_out, theirs_out = (m(*given, key_padding_mask=bias, attn_mask=mask)[0] for m in (ours, theirs))
    grads = [torch.autograd.grad(out.square().sum(), bias)[0] for out in (ours_out, theirs_out)]
    assert relative_error(*grads) < EXACT
    assert grads[0].abs().max() > 0.1


def test_a_padding_bias_beyond_the_range_of_a_half_type_stays_finite() -> None:
    module = SparseMultiheadAttention(16, 2, batch_first=True, dtype=torch.float16, pattern=Window(30))
    x = torch.randn(1, 20, 16).half()
    # The same for every key, so it changes no weight.
    bias = torch.full((1, 20), -1e30, dtype=torch.float64)
    plain, biased = (module(x, x, x, need_weights=False, **how)[0] for how in ({}, {"key_padding_mask": bias}))
    assert (plain - biased).abs().max() < 0.01 * plain.abs().max()


@pytest.mark.parametrize(("diagonal", "is_causal"), [(0, False), (3, True), (1, False)])
def test_only_the_lower_right_mask_is_causal_here(diagonal: int, is_causal: bool) -> None:
    recorder = Recorder()
    ours, theirs = modules("plain", pattern=Window(8), attend=recorder)
    mask = torch.ones(9, 12).tril(diagonal) == 0
    dropped = mask | ~kept_by(Window(8), 9, 12)[0]
    assert_same(ours, theirs, inputs(ours, 2, 9, 12), {"attn_mask": mask}, {"attn_mask": dropped})
    assert {how["is_causal"] for how in recorder.calls} == {is_causal}


@pytest.mark.parametrize("kind", ["self", "memory"])
@pytest.mark.parametrize("variant", ["plain", "no bias", "batch first", "bias_kv"])
def test_packed_projections(variant: str, kind: str) -> None:
    for attend in (elsewhere, sparse_attention):
        ours, theirs = modules(variant, attend=attend)
        assert_same(ours, theirs, inputs(ours, 2, 7, 9, kind), {})


PATTERNS = (LOCAL, Window(3), per_head([Causal(), Window(2), Dense(), LOCAL]))


def kept_by(pattern: Pattern, n_queries: int, n_keys: int) -> Tensor:
    """``[H, Nq, Nk]``, from the element rule."""
    query = torch.arange(n_keys - n_queries, n_keys)
    return torch.stack([pattern.allowed(torch.tensor(h), query[:, None], torch.arange(n_keys)) for h in range(H)])


@pytest.mark.parametrize(
    ("variant", "name", "pattern"),
    [(variant, "none", LOCAL) for variant in VARIANTS]
    # A row without keys would be NaN in PyTorch, but for the key that these add.
    + all_pairs(["bias_kv", "zero_attn", "all of it"], MASKS[:-1], PATTERNS),
    ids=str,
)
def test_masks_and_patterns_keep_the_pairs_of_both(variant: str, name: str, pattern: Pattern) -> None:
    ours, theirs = modules(variant, pattern=pattern)
    arguments = masks_named(name, 2, 129, 140)
    dropped = ~kept_by(pattern, 129, 140).repeat(2, 1, 1)
    if (other := arguments.get("attn_mask")) is not None:
        dropped = dropped | (other if other.dtype == torch.bool else other == -torch.inf)
    expected = {**arguments, "attn_mask": dropped}
    if name.endswith("bias"):
        expected["attn_mask"] = torch.zeros(dropped.shape, dtype=torch.float64).masked_fill(dropped, -torch.inf)
    assert_same(ours, theirs, inputs(ours, 2, 129, 140), arguments, expected)


def test_a_query_that_keeps_nothing_gives_the_output_bias_and_no_gradient() -> None:
    module, _ = modules("batch first", pattern=Causal() & ~Window(2))
    x = torch.randn(1, 10, E, dtype=torch.float64, requires_grad=True)
    for arguments in ({"need_weights": False}, {}):
        out, weights = module(x, x, x, **arguments)
        assert torch.equal(out[0, :3], module.out_proj.bias.expand(3, -1))
        assert not torch.equal(out[0, 3], module.out_proj.bias)
        assert weights is None or not weights[0, :3].any()
        (grad,) = torch.autograd.grad(out[0, :3].sum(), x)
        assert torch.equal(grad, torch.zeros_like(grad))


def test_what_is_padded_may_be_nan() -> None:
    module, _ = modules("batch first", pattern=LOCAL)
    x = torch.randn(2, 12, E, dtype=torch.float64)
    padding = torch.zeros(2, 12, dtype=torch.bool)
    padding[0, 9:] = True
    spoilt = x.clone()
    spoilt[0, 9:] = torch.nan
    for arguments in ({"need_weights": False}, {}):
        expected = module(x, x, x, key_padding_mask=padding, **arguments)
        actual = module(x, spoilt, spoilt, key_padding_mask=padding, **arguments)
        assert all(e is None or torch.equal(a, e) for a, e in zip(actual, expected, strict=True))


@pytest.mark.parametrize("name", ["none", "padding", "dropped"])
@pytest.mark.parametrize("pattern", [None, LOCAL], ids=str)
def test_unbatched_inputs(pattern: Pattern | None, name: str) -> None:
    ours, theirs = modules("all of it", pattern=pattern)
    given = [x.squeeze(0) for x in inputs(ours, 1, 13, 13)]
    arguments = {
        key: mask.squeeze(0) if "padding" in key else mask for key, mask in masks_named(name, 1, 13, 13).items()
    }
    expected = dict(arguments)
    if pattern is not None:
        dropped = ~kept_by(pattern, 13, 13)
        expected["attn_mask"] = dropped | arguments.get("attn_mask", torch.tensor(False))
    assert_same(ours, theirs, given, arguments, expected)


class Recorder:
    """An ``attend`` that remembers how it was called."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, **how: Any) -> Any:
        self.calls.append(how)
        return sparse_attention(query, key, value, **how)


def test_the_causal_mask_becomes_is_causal() -> None:
    recorder = Recorder()
    module, _ = modules("batch first", pattern=Window(4), attend=recorder)
    mask = nn.Transformer.generate_square_subsequent_mask(30, dtype=torch.float64)
    x = torch.randn(2, 30, E, dtype=torch.float64)
    for masks in ({"attn_mask": mask}, {"attn_mask": mask.isinf()}, {"is_causal": True}):
        module(x, x, x, need_weights=False, **masks)
    assert recorder.calls == [{"pattern": Window(4), "is_causal": True, "key_mask": None, "dropout_p": 0.0}] * 3


def test_floating_padding_without_a_bias_becomes_the_key_mask() -> None:
    recorder = Recorder()
    module, _ = modules("batch first", pattern=Window(4), attend=recorder)
    x = torch.randn(2, 30, E, dtype=torch.float64)
    padding = masks_named("padding", 2, 30, 30)["key_padding_mask"]
    floats = torch.zeros(2, 30, dtype=torch.float64).masked_fill(padding, -torch.inf)
    outs = [module(x, x, x, mask, need_weights=False)[0] for mask in (padding, floats)]
    assert torch.equal(*outs)
    for how in recorder.calls:
        assert "scale" not in how
        assert torch.equal(how["key_mask"], ~padding)


def test_is_causal_alone_is_causal_attention() -> None:
    ours, theirs = modules("all of it")
    mask = nn.Transformer.generate_square_subsequent_mask(9, dtype=torch.float64)
    assert_same(ours, theirs, inputs(ours, 2, 9, 9), {"is_causal": True}, {"attn_mask": mask})


def test_a_wrong_hint_does_not_outweigh_the_mask() -> None:
    module, theirs = modules("plain", pattern=Window(30))
    mask = masks_named("dropped", 2, 9, 9)["attn_mask"]
    assert_same(module, theirs, inputs(module, 2, 9, 9), {"attn_mask": mask, "is_causal": True}, {"attn_mask": mask})


def test_a_mask_is_read_once_and_again_when_it_changes() -> None:
    module, theirs = modules("plain", pattern=Window(30))
    mask = masks_named("dropped", 2, 9, 9)["attn_mask"]
    given = inputs(module, 2, 9, 9)
    module(*given, attn_mask=mask)
    misses = cache_info().misses
    module(*given, attn_mask=mask)
    assert cache_info().misses == misses
    mask[3, 2:8] ^= True
    assert_same(module, theirs, given, {"attn_mask": mask})
    with torch.inference_mode():
        mask = mask.clone()
        for _ in range(2):
            outs = [m(*given, attn_mask=mask)[0] for m in (module, theirs)]
            assert relative_error(*outs) < EXACT
            mask[4, 2:8] ^= True


@pytest.mark.parametrize(
    ("kind", "floating", "n_tokens"),
    all_pairs(["numpy", "new data", "expanded", "slice"], [False, True], [9, 64, 65]),
)
def test_a_mask_changed_behind_its_version_is_read_again(kind: str, floating: bool, n_tokens: int) -> None:
    module, theirs = modules("plain", pattern=Window(80))
    given = inputs(module, 2, n_tokens, n_tokens)
    mask = torch.zeros(n_tokens, n_tokens, dtype=torch.float64 if floating else torch.bool)
    dropped = -torch.inf if floating else True
    memory: Any = mask.data
    if kind == "numpy":
        memory = mask.numpy()
        mask = torch.from_numpy(memory)
    elif kind == "expanded":
        mask = mask.expand(2 * H, -1, -1)
    elif kind == "slice":
        memory = torch.cat([memory, memory], 1)
        mask = memory[:, 3 : 3 + n_tokens]
        memory = mask.data

    for row, key in ((0, n_tokens - 1), (n_tokens - 1, 0), (4, 4)):
        version = mask._version
        if kind == "new data":
            memory = memory.clone()
            mask.data = memory
        memory[row, key] = dropped
        assert mask._version == version
        assert bool((mask == dropped)[..., row, key].all())
        assert_same(module, theirs, given, {"attn_mask": mask})


def test_a_large_mask_of_numpy_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringtile.patterns.mask._SMALL", 8)
    module, theirs = modules("plain", pattern=Window(30))
    given = inputs(module, 2, 9, 9)
    memory = torch.zeros(9, 9, dtype=torch.bool).numpy()
    mask, view = torch.from_numpy(memory), torch.zeros(9, 9, dtype=torch.bool)
    assert_same(module, theirs, given, {"attn_mask": mask})
    memory[5, 2] = True
    assert_same(module, theirs, given, {"attn_mask": mask})
    # Nor is memory that numpy was shown later.
    for key in (1, 2):
        view.numpy()[4, key] = True
        assert_same(module, theirs, given, {"attn_mask": view})


def test_one_mask_serves_modules_with_other_numbers_of_heads() -> None:
    mask = masks_named("dropped per head", 2, 9, 9)["attn_mask"]
    for heads, batch in ((H, 2), (2, H)):
        theirs = nn.MultiheadAttention(E, heads, dtype=torch.float64)
        module = replace_attention(copy.deepcopy(theirs), pattern=Window(30))
        assert_same(module, theirs, inputs(module, batch, 9, 9), {"attn_mask": mask})


def test_a_mask_repeated_for_each_head_is_read_as_one() -> None:
    recorder = Recorder()
    module, theirs = modules("plain", attend=recorder)
    mask = masks_named("dropped", 2, 9, 9)["attn_mask"]
    causal = torch.ones(9, 9).triu(1).bool()
    each = torch.stack([mask, mask.flip(0)]).repeat_interleave(H, 0)
    each[:, :, -1] = False
    for repeated in (mask.expand(2 * H, -1, -1), each, causal.repeat(2 * H, 1, 1)):
        assert_same(module, theirs, inputs(module, 2, 9, 9), {"attn_mask": repeated})
        recorder.calls = recorder.calls[-1:]
        module(*inputs(module, 2, 9, 9), attn_mask=repeated)
        pattern = recorder.calls[-1]["pattern"]
        if repeated is each:
            assert (pattern.batch_size, pattern.num_heads) == (2, None)
        elif pattern is not None:
            assert (pattern.batch_size, pattern.num_heads) == (None, None)
        else:
            assert recorder.calls[-1]["is_causal"]


def test_no_mask_is_kept_alive() -> None:
    clear_cache()
    module, _ = modules("plain", pattern=Window(3), attend=Recorder())
    mask = masks_named("dropped", 2, 9, 9)["attn_mask"]
    module(*inputs(module, 2, 9, 9), attn_mask=mask)
    alive = ref(mask)
    del mask
    gc.collect()
    assert cache_info().entries == 1
    assert alive() is None


@pytest.mark.parametrize("kind", ["block mask", "tiles"])
def test_a_module_takes_a_block_mask_or_tiles(kind: str) -> None:
    tiles = torch.tensor([[True, False], [True, True]])
    given: Any = tiles if kind == "tiles" else to_block_mask(build_index(Blocks(tiles), 200))
    x = torch.randn(2, 200, E)
    module = SparseMultiheadAttention(E, H, batch_first=True, pattern=Blocks(tiles))
    expected = module(x, x, x, need_weights=False)[0]
    module.pattern = None
    replace_attention(module, pattern=given)
    assert torch.equal(module(x, x, x, need_weights=False)[0], expected)
    copied = SparseMultiheadAttention(E, H, batch_first=True, pattern=given)
    copied.load_state_dict(module.state_dict())
    assert torch.equal(copied(x, x, x, need_weights=False)[0], expected)
    assert isinstance(copied.pattern, Pattern)
    stacks = [SparseTransformer(1, E, H, pattern=pattern) for pattern in (given, [given])]
    assert all(stack.layers[0].pattern == copied.pattern for stack in stacks)


def test_replacing_again_changes_the_pattern() -> None:
    layer = nn.TransformerEncoder(nn.TransformerEncoderLayer(E, H, batch_first=True), 2, enable_nested_tensor=False)
    x, recorder = torch.randn(1, 60, E), Recorder()
    replace_attention(layer.eval(), pattern=Window(3))
    first = layer(x)
    modules = [part.self_attn for part in layer.layers]
    replace_attention(layer, pattern=Window(9), attend=recorder)
    assert [part.self_attn for part in layer.layers] == modules
    assert not torch.allclose(layer(x), first)
    assert [call["pattern"] for call in recorder.calls] == [Window(9)] * 2
    replace_attention(layer, pattern=Window(3))
    assert torch.equal(layer(x), first)
    with pytest.raises(ValueError, match="defined for 3 heads"):
        replace_attention(layer, pattern=per_head([Window(1)] * 3))
    assert torch.equal(layer(x), first)


@pytest.mark.parametrize("variant", ["batch first", "all of it"])
def test_dropped_weights_are_those_that_made_the_output(variant: str) -> None:
    module, _ = modules(variant, pattern=LOCAL)
    module.dropout = 0.5
    given = [x.detach() for x in inputs(module, 2, 300, 300)]
    torch.manual_seed(3)
    out, weights = module(*given, average_attn_weights=False)
    torch.manual_seed(3)
    assert torch.equal(weights, module(*given, average_attn_weights=False)[1])
    assert not torch.equal(weights, module(*given, average_attn_weights=False)[1])
    whole = module.eval()(*given, average_attn_weights=False)[1]
    some = whole > 0
    assert relative_error(weights[weights > 0], 2 * whole[weights > 0]) < EXACT
    assert abs((weights[some] > 0).double().mean().item() - 0.5) < 0.03
    columns = torch.eye(whole.shape[-1], dtype=torch.float64)
    *_, value = module._project(*given)
    value = torch.cat([module._split_heads(value), *_extra_values(module)], 2)
    joined = (weights @ (columns @ value)).transpose(1, 2).flatten(2)
    assert relative_error(out, module.out_proj(joined)) < EXACT
    assert torch.equal(whole, module(*given, average_attn_weights=False)[1])


def _extra_values(module: SparseMultiheadAttention) -> list[Tensor]:
    found = []
    if module.bias_v is not None:
        found.append(module.bias_v.view(1, H, 1, -1).expand(2, -1, -1, -1))
    if module.add_zero_attn:
        found.append(torch.zeros(2, H, 1, E // H, dtype=torch.float64))
    return found


@pytest.mark.parametrize(
    ("pattern", "n_queries", "n_keys"),
    [
        *((LOCAL, *lengths) for lengths in ((300, 300), (150, 310), (5, 3))),
        *((pattern, 150, 310) for pattern in (PATTERNS[2], Dense())),
        *((~Window(300), *lengths) for lengths in ((300, 300), (5, 3))),
    ],
    ids=str,
)
def test_block_sparse_weights_are_the_dense_ones(pattern: Pattern, n_queries: int, n_keys: int) -> None:
    module, _ = modules("plain", pattern=pattern)
    dense_module = copy.deepcopy(module)
    # Torch's own function, which serves the dense pattern, gives NaN where nothing is kept.
    dense_module.attend = elsewhere
    given = inputs(module, 2, n_queries, n_keys)
    padding = masks_named("padding bias", 2, n_queries, n_keys)["key_padding_mask"]
    front = (n_keys - n_queries) % 128
    mask = torch.ones(n_queries, n_keys, dtype=torch.bool).triu(1 + n_keys - n_queries)
    for arguments in ({}, {"key_padding_mask": padding}, {"average_attn_weights": False, "attn_mask": mask}):
        out, tiles = module(*given, need_weights="block_sparse", **arguments)
        expected_out, expected = dense_module(*given, **arguments)
        assert tiles.is_coalesced()
        assert tiles.shape[-2:] == (128, 128)
        dense = tiles.to_dense().transpose(-3, -2).flatten(-4, -3).flatten(-2)
        dense = dense[..., front : front + n_queries, :n_keys]
        assert relative_error(out, expected_out) < EXACT
        assert relative_error(dense, expected) < EXACT
        assert tiles.to_dense().sum().item() == pytest.approx(expected.sum().item())
        found, wanted = gradients(module, given, [dense]), gradients(dense_module, given, [expected])
        for name, grad in wanted.items():
            assert relative_error(found[name], grad) < 1e-10, name


def test_block_sparse_weights_have_finite_gradients_beside_huge_scores() -> None:
    module, _ = modules("batch first", pattern=Causal())
    x = torch.randn(1, 20, E, dtype=torch.float64)
    # exp() of what the last key scores overflows against the lse of the queries that may not attend to it.
    x[:, -1] *= 1e4
    x.requires_grad_()
    grads = []
    for arguments in ({"need_weights": "block_sparse"}, {}):
        weights = module(x, x, x, **arguments)[1]
        first = weights.to_dense()[:, 0, 0] if weights.is_sparse else weights
        grads.append(torch.autograd.grad(first[:, :19, :20].square().sum(), x)[0])
    assert relative_error(*grads) < 1e-10


def test_block_sparse_weights_hold_the_kept_tiles_alone() -> None:
    module, _ = modules("batch first", pattern=Causal() & Window(100))
    x = torch.randn(1, 1280, E, dtype=torch.float64)
    _, tiles = module(x, x, x, need_weights="block_sparse")
    assert tiles.shape == (1, 10, 10, 128, 128)
    assert tiles._nnz() == 19


def test_weights_have_a_stated_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    module, theirs = modules("batch first", pattern=LOCAL)
    x = torch.randn(2, 10, E, dtype=torch.float64)
    monkeypatch.setattr(multihead, "MAX_WEIGHTS", 2 * H * 100)
    assert module(x, x, x)[1].shape == (2, 10, 10)
    monkeypatch.setattr(multihead, "MAX_WEIGHTS", 2 * H * 100 - 1)
    with pytest.raises(ValueError, match="800 elements, over 799; use need_weights=False"):
        module(x, x, x)
    assert module(x, x, x, need_weights=False)[1] is None
    dense = replace_attention(theirs, pattern=None)
    assert dense(x, x, x)[1].shape == (2, 10, 10)


def encoder(pattern: Pattern | None, n_layers: int = 2, **arguments: Any) -> nn.TransformerEncoder:
    arguments = {"dropout": 0.0, "batch_first": True, "dtype": torch.float64} | arguments
    layer = nn.TransformerEncoderLayer(E, H, 32, **arguments)
    model = nn.TransformerEncoder(layer, n_layers, enable_nested_tensor=False)
    return replace_attention(model, pattern=pattern)


def in_evaluation(model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
    """The output without a graph, where torch takes its fused kernels."""
    with torch.inference_mode():
        return model.eval()(*args, **kwargs)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("none", {"bias": False}), ("padding", {"norm_first": True}), ("causal", {"activation": "gelu"})],
    ids=str,
)
def test_an_encoder_trains_and_evaluates_alike(arguments: dict[str, Any], name: str) -> None:
    model = encoder(LOCAL, **arguments)
    x = torch.randn(3, 60, E, dtype=torch.float64)
    padding = torch.arange(60) >= torch.tensor([60, 41, 50])[:, None]
    masks = {
        "none": {},
        "padding": {"src_key_padding_mask": padding},
        "causal": {"mask": nn.Transformer.generate_square_subsequent_mask(60, dtype=torch.float64)},
    }[name]
    trained = model.train()(x, **masks)
    assert relative_error(in_evaluation(model, x, **masks), trained) < EXACT
    earlier = x.clone()
    earlier[:, 2:30] = torch.randn(3, 28, E, dtype=torch.float64)
    # Two layers of a causal window of 5 and two sinks: what changed at 29 is seen up to 39.
    for out in (model.train()(earlier, **masks), in_evaluation(model, earlier, **masks)):
        assert torch.equal(out[:, 40:], trained[:, 40:]) or relative_error(out[:, 40:], trained[:, 40:]) < EXACT
        assert relative_error(out[:, 30:32], trained[:, 30:32]) > 1e-3


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("pattern", [LOCAL, None], ids=str)
def test_an_encoder_built_for_nested_tensors_trains_and_evaluates_alike(pattern: Pattern | None) -> None:
    layer = nn.TransformerEncoderLayer(E, H, 32, 0.0, batch_first=True, dtype=torch.float64)
    model = nn.TransformerEncoder(layer, 2)
    assert model.use_nested_tensor
    replace_attention(model, pattern=pattern)
    x = torch.randn(3, 60, E, dtype=torch.float64)
    padding = torch.arange(60) >= torch.tensor([60, 41, 50])[:, None]
    trained = model.train()(x, src_key_padding_mask=padding)
    evaluated = in_evaluation(model, x, src_key_padding_mask=padding)
    assert not evaluated[padding].any()
    assert relative_error(evaluated[~padding], trained[~padding]) < EXACT


@pytest.mark.parametrize("batch_first", [False, True])
def test_a_decoder_trains_and_evaluates_alike(batch_first: bool) -> None:
    plain = nn.TransformerDecoderLayer(E, H, 32, 0.0, batch_first=batch_first, dtype=torch.float64)
    layer = copy.deepcopy(plain)
    replace_attention(layer.self_attn, pattern=LOCAL)
    replace_attention(layer.multihead_attn, pattern=None)
    x, memory = (torch.randn(2, length, E, dtype=torch.float64) for length in (30, 17))
    if not batch_first:
        x, memory = x.transpose(0, 1), memory.transpose(0, 1)
    mask = nn.Transformer.generate_square_subsequent_mask(30, dtype=torch.float64)
    trained = layer(x, memory, tgt_mask=mask, tgt_is_causal=True)
    expected = plain(x, memory, tgt_mask=~kept_by(LOCAL, 30, 30)[0])
    assert relative_error(trained, expected) < EXACT
    assert relative_error(in_evaluation(layer, x, memory, tgt_mask=mask), trained) < EXACT


@pytest.mark.parametrize("variant", VARIANTS)
def test_checkpoints_load_both_ways(variant: str) -> None:
    ours = SparseMultiheadAttention(E, H, **VARIANTS[variant], pattern=LOCAL)
    theirs = nn.MultiheadAttention(E, H, **VARIANTS[variant])
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for source, target in ((ours, theirs), (theirs, ours)):
        with torch.no_grad():
            for parameter in source.parameters():
                parameter.normal_()
        target.load_state_dict(source.state_dict())
        assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))

    for again in (False, True):
        found = []
        for kind in (SparseMultiheadAttention, nn.MultiheadAttention):
            torch.manual_seed(5)
            module = kind(E, H, **VARIANTS[variant])
            if again:
                module._reset_parameters()
            found.append(dict(module.named_parameters()))
        assert found[0].keys() == found[1].keys()
        assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_device_and_dtype_reach_every_parameter() -> None:
    module = SparseMultiheadAttention(E, H, add_bias_kv=True, kdim=5, device="meta", dtype=torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in module.parameters()} == {("meta", torch.bfloat16)}


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_do_the_same(copied: Callable[[nn.Module], nn.Module]) -> None:
    module, _ = modules("batch first", pattern=LOCAL, attend=partial(sparse_attention, softcap=5.0))
    twin = copied(module)
    x = torch.randn(1, 40, E, dtype=torch.float64)
    assert (twin.pattern, twin._qkv_same_embed_dim) == (LOCAL, False)
    assert torch.equal(twin(x, x, x)[0], module(x, x, x)[0])
    assert twin.in_proj_weight is not module.in_proj_weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("variant", ["batch first", "bias_kv"])
def test_low_precision(variant: str, dtype: torch.dtype) -> None:
    module, theirs = modules(variant, pattern=LOCAL)
    module, theirs = module.to(dtype), theirs.to(dtype)
    reference = copy.deepcopy(theirs).double()
    given = [x.detach().to(dtype) for x in inputs(module, 2, 140, 140)]
    dropped = ~kept_by(LOCAL, 140, 140)[0]
    for weights in ({"need_weights": False}, {}):
        actual = module(*given, **weights)
        torchs = theirs(*given, attn_mask=dropped, **weights)
        expected = reference(*(x.double() for x in given), attn_mask=dropped, **weights)
        for a, t, e in zip(actual, torchs, expected, strict=True):
            if e is not None:
                assert a.dtype == dtype
                assert relative_error(a, e) < 2 * relative_error(t, e)


def test_autocast_takes_mixed_dtypes() -> None:
    def wider(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        # As rotary positions leave them.
        return sparse_attention(query.float(), key.float(), value, **options)

    module, _ = modules("all of it", pattern=LOCAL)
    module = module.float()
    query, key, value = (x.detach().float() for x in inputs(module, 2, 60, 60))
    exact = module(query, key, value)
    with torch.autocast("cpu", torch.bfloat16):
        expected = module(query.bfloat16(), key, value)
        assert expected[0].dtype == torch.bfloat16
        assert all(relative_error(a, e) < 0.02 for a, e in zip(expected, exact, strict=True))
        sum(y.float().sum() for y in expected).backward()
        assert all(parameter.grad is not None for parameter in module.parameters())
        module.attend = wider
        for given in ((query, key, value), (query, key.bfloat16(), value), (query.bfloat16(), key, value.bfloat16())):
            for a, e in zip(module(*given), expected, strict=True):
                assert torch.equal(a, e)


# Of torch's own tracing of a Function.
@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")
def test_compile_in_one_graph() -> None:
    module, _ = modules("all of it", pattern=LOCAL)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    given = inputs(module, 2, 40, 40)
    mask = nn.Transformer.generate_square_subsequent_mask(40, dtype=torch.float64)
    padding = masks_named("padding bias", 2, 40, 40)["key_padding_mask"]
    for arguments in (
        {"need_weights": False},
        {"attn_mask": mask, "is_causal": True, "key_padding_mask": padding},
    ):
        actual, expected = (list(filter(torch.is_tensor, m(*given, **arguments))) for m in (compiled, module))
        assert all(relative_error(a, e) < EXACT for a, e in zip(actual, expected, strict=True))
        found, wanted = gradients(module, given, actual), gradients(module, given, expected)
        assert all(relative_error(found[name], wanted[name]) < EXACT for name in wanted)


def test_a_traced_graph_needs_the_hint() -> None:
    module, _ = modules("batch first", pattern=LOCAL)
    x = torch.randn(1, 20, E, dtype=torch.float64)
    mask = nn.Transformer.generate_square_subsequent_mask(20, dtype=torch.float64)
    with pytest.raises(Exception, match="a traced graph cannot look at values"):
        torch.compile(module, fullgraph=True, backend="eager")(x, x, x, attn_mask=mask, need_weights=False)
    with pytest.raises(ValueError, match=r"attn_mask, .*cannot look at values: expected .* got mask.shape=.*20, 20"):
        torch.export.export(module, (x, x, x), {"attn_mask": mask, "need_weights": False}, strict=False)


# Of torch's own reading of the tensors after a break.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning")
def test_a_compiled_module_reads_each_mask_outside_its_graphs() -> None:
    module, _ = modules("batch first", pattern=LOCAL)
    x = torch.randn(1, 20, E, dtype=torch.float64)
    torch._dynamo.reset()
    compiled, counts = torch.compile(module, backend=(counter := CompileCounter())), []
    for density in (0.9, 0.1, 0.5):
        kept = torch.rand(20, 20) < density
        q, k, v = (module._split_heads(y) for y in module._project(x, x, x))
        expected, _ = attention_reference(q, k, v, from_mask(kept) & LOCAL)
        expected = module.out_proj(expected.transpose(1, 2).flatten(2))
        found = compiled(x, x, x, attn_mask=~kept, need_weights=False)[0]
        assert relative_error(found, expected) < EXACT
        counts.append(counter.frame_count)
    assert counts[-1] == counts[0]


def test_replace_attention_keeps_parameters_and_hooks() -> None:
    model = nn.Transformer(E, H, 2, 2, 32, batch_first=True)
    shared = model.encoder.layers[0].self_attn
    model.encoder.layers[1].self_attn = shared
    before = dict(model.named_parameters())
    seen: list[str] = []
    shared.register_forward_hook(lambda *_: seen.append("hook"))
    assert replace_attention(model, pattern=Window(4)) is model
    found = [m for m in model.modules() if isinstance(m, nn.MultiheadAttention)]
    assert len(found) == 5
    assert all(type(m) is SparseMultiheadAttention and m.pattern == Window(4) for m in found)
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    model.encoder(torch.randn(1, 8, E))
    assert seen == ["hook", "hook"]


def test_replace_attention_leaves_subclasses_alone_and_says_when_there_is_nothing() -> None:
    class Special(nn.MultiheadAttention):
        pass

    class Other(SparseMultiheadAttention):
        pass

    model = nn.ModuleList([Special(E, H), nn.MultiheadAttention(E, H), Other(E, H)])
    replace_attention(model, pattern=LOCAL)
    assert [type(module) for module in model] == [Special, SparseMultiheadAttention, Other]
    assert model[2].pattern is None
    with pytest.raises(ValueError, match=r"model: expected a torch\.nn.MultiheadAttention in it, got Linear"):
        replace_attention(nn.Linear(2, 2), pattern=LOCAL)
    model = nn.ModuleList([nn.MultiheadAttention(E, 2), nn.MultiheadAttention(E, H)])
    with pytest.raises(ValueError, match=r"pattern: .* is defined for 2 heads, got num_heads=4"):
        replace_attention(model, pattern=per_head([Causal(), Dense()]))
    assert [type(module) for module in model] == [nn.MultiheadAttention] * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"embed_dim": 10}, "embed_dim: expected a positive multiple of num_heads, got embed_dim=10, num_heads=4"),
        ({"num_heads": 0}, "embed_dim: .* num_heads=0"),
        ({"dropout": 1.0}, r"dropout: expected a probability in \[0, 1\), got 1.0"),
        ({"kdim": 0}, "kdim: expected a positive width or None, got kdim=0"),
        ({"pattern": 3}, "pattern: expected a Pattern, its text, a BlockMask or a bool matrix of tiles, got int"),
        ({"pattern": per_head([Causal(), Dense()])}, "is defined for 2 heads, got num_heads=4"),
        ({"attend": None}, "attend: expected a function of query, key and value, got None"),
    ],
)
def test_the_constructor_refuses(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SparseMultiheadAttention(**({"embed_dim": E, "num_heads": H} | arguments))


X = torch.zeros(2, 6, E)


@pytest.mark.parametrize(
    ("given", "arguments", "message"),
    [
        ((X[None], X, X), {}, "query, key, value: expected all three-dimensional"),
        ((X[..., 1:], X, X), {}, "query: expected 24 features"),
        ((X, X, X[..., 1:]), {}, "value: expected 24 features"),
        ((X, X[:, 1:], X), {}, "key, value: expected the query's batch and one length"),
        ((X, X[:1], X[:1]), {}, "key, value: expected the query's batch"),
        ((X, X, X), {"key_padding_mask": torch.zeros(6, 2).bool()}, r"key_padding_mask: expected shape \(2, 6\)"),
        ((X, X, X), {"key_padding_mask": torch.zeros(2, 6).int()}, "key_padding_mask: expected bool or a floating"),
        ((X, X, X), {"attn_mask": torch.zeros(2, 6, 6)}, r"attn_mask: expected shape \(6, 6\) or \(8, 6, 6\)"),
        ((X, X, X), {"attn_mask": torch.full((6, 6), -1.0)}, "attn_mask: no kernel adds a floating mask"),
        ((X, X, X), {"attn_mask": torch.zeros(6, 6, requires_grad=True)}, r"mask.requires_grad=True"),
        ((X[:, :4], X, X), {"is_causal": True}, "is_causal: without attn_mask it needs as many queries as keys"),
        ((X, X, X), {"need_weights": "bsr"}, "need_weights: expected True, False or 'block_sparse', got 'bsr'"),
    ],
)
def test_the_call_refuses(given: tuple[Tensor, ...], arguments: dict[str, Any], message: str) -> None:
    module = SparseMultiheadAttention(E, H, batch_first=True, pattern=LOCAL)
    with pytest.raises(ValueError, match=message):
        module(*given, **arguments)


def test_block_sparse_weights_are_refused() -> None:
    for name, value, message in (
        ("dropout", 0.1, "'block_sparse' does not support dropout, got self.dropout=0.1"),
        ("add_bias_kv", True, "'block_sparse' does not support add_bias_kv or add_zero_attn"),
        ("add_zero_attn", True, "'block_sparse' does not support add_bias_kv or add_zero_attn"),
        ("attend", elsewhere, "'block_sparse' needs attend=sparse_attention"),
    ):
        module = SparseMultiheadAttention(E, H, batch_first=True, pattern=LOCAL, **{name: value})
        with pytest.raises(ValueError, match=message):
            module(X, X, X, need_weights="block_sparse")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused_where_lengths_could_be_lost() -> None:
    module = SparseMultiheadAttention(E, H, batch_first=True, pattern=LOCAL)
    rows = torch.nested.nested_tensor([torch.zeros(3, E), torch.zeros(5, E)])
    with pytest.raises(ValueError, match="comes with need_weights=False and without masks"):
        module(rows, rows, rows)
    with pytest.raises(ValueError, match="needs query is key is value and batch_first"):
        module(X, rows, rows, need_weights=False)


def test_a_mask_cannot_serve_other_lengths() -> None:
    def halves(query: Tensor, key: Tensor, value: Tensor, **how: Any) -> Tensor:
        parts = zip(*(x.chunk(2, 2) for x in (query, key, value)), strict=True)
        return torch.cat([sparse_attention(*part, **how) for part in parts], 2)

    module = SparseMultiheadAttention(E, H, batch_first=True, attend=halves)
    mask = torch.eye(6, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"mask of 6 queries from position 0 and 6 keys: got grid.n_queries=3"):
        module(X, X, X, attn_mask=mask, need_weights=False)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
@pytest.mark.parametrize("low", ["-1e9", "lowest"])
def test_finite_numbers_as_low_as_a_mask_drop_pairs_as_in_pytorch(low: str, dtype: torch.dtype) -> None:
    number = torch.finfo(dtype).min if low == "lowest" or dtype == torch.float16 else -1e9
    dropped = torch.rand(2 * H, 9, 9) < 0.4
    dropped[:, range(9), range(9)] = False
    ours, theirs = modules("batch first", pattern=Window(4))
    mask = torch.zeros(dropped.shape, dtype=dtype).masked_fill(dropped, number)
    outside = ~kept_by(Window(4), 9, 9).repeat(2, 1, 1)
    assert_same(ours, theirs, inputs(ours, 2, 9, 9), {"attn_mask": mask}, {"attn_mask": dropped | outside})


def test_a_row_of_finite_numbers_alone_is_refused() -> None:
    sparse, x = SparseMultiheadAttention(16, 4, batch_first=True, pattern=Window(4)), torch.randn(1, 9, 16)
    mask = torch.zeros(9, 9)
    mask[3] = -1e9
    for wrong in (mask, mask.masked_fill(mask < 0, -1e8).tril(), torch.full((9, 9), -1e4).triu(1)):
        with pytest.raises(
            ValueError, match=r"attn_mask: .*-1000000000 and less count as -inf in rows with a 0\), got"
        ):
            sparse(x, x, x, attn_mask=wrong)
    # -inf there is an empty row, whose output is the bias.
    out = sparse(x, x, x, attn_mask=mask.masked_fill(mask < 0, -torch.inf), need_weights=False)[0]
    assert torch.equal(out[0, 3], sparse.out_proj.bias)
