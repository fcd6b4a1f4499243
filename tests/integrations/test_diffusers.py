"""Models of diffusers over a pattern equal the same models with the pattern as a dense mask."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from oracle import kept_pairs, refused, relative_error
from tiny import Lazily
from torch import Tensor, nn

from ringtile.integrations import diffusers as integration
from ringtile.integrations.diffusers import SparseAttnProcessor, use_ringtile
from ringtile.patterns import Causal, GlobalTokens, Pattern, Window

diffusers, processors = Lazily("diffusers"), Lazily("diffusers.models.attention_processor")
pytestmark = pytest.mark.skipif(find_spec("diffusers") is None, reason="diffusers is not installed")

PATTERN = Window(9) | GlobalTokens(3)
DENSE = F.scaled_dot_product_attention


JOINT = dict(in_channels=4, num_attention_heads=2, joint_attention_dim=16, pooled_projection_dim=16)


def unet() -> nn.Module:
    down, up = ("CrossAttnDownBlock2D", "DownBlock2D"), ("UpBlock2D", "CrossAttnUpBlock2D")
    sizes = dict(sample_size=16, block_out_channels=(16, 32), layers_per_block=1, norm_num_groups=8)
    attention = dict(cross_attention_dim=16, attention_head_dim=8)
    return diffusers.UNet2DConditionModel(**sizes, **attention, down_block_types=down, up_block_types=up)


def flux() -> nn.Module:
    return diffusers.FluxTransformer2DModel(
        **JOINT, patch_size=1, num_layers=1, num_single_layers=1, attention_head_dim=16, axes_dims_rope=(4, 4, 8)
    )


def stable_diffusion_3() -> nn.Module:
    sizes = dict(sample_size=16, patch_size=2, num_layers=2, attention_head_dim=8, out_channels=4)
    return diffusers.SD3Transformer2DModel(**JOINT, **sizes, caption_projection_dim=16)


def wan() -> nn.Module:
    heads = dict(num_attention_heads=2, attention_head_dim=12, cross_attn_norm=True, rope_max_seq_len=32)
    sizes = dict(patch_size=(1, 2, 2), in_channels=4, out_channels=4, text_dim=16, freq_dim=16, ffn_dim=16)
    return diffusers.WanTransformer3DModel(**heads, **sizes, num_layers=1, qk_norm="rms_norm_across_heads")


def images(model: nn.Module) -> Tensor:
    """One step of a model on fixed inputs. No text is as long as an image."""
    torch.manual_seed(1)
    picture, text = torch.randn(2, 4, 16, 16), torch.randn(2, 24, 16)
    times = torch.tensor([1, 5])
    if isinstance(model, diffusers.UNet2DConditionModel):
        return model(picture, times, text).sample
    if isinstance(model, diffusers.WanTransformer3DModel):
        return model(picture[:, :, None], times, text).sample
    pooled = torch.randn(2, 16)
    if isinstance(model, diffusers.SD3Transformer2DModel):
        return model(picture, text, pooled, times).sample
    at = torch.stack(torch.meshgrid(torch.zeros(1), torch.arange(8.0), torch.arange(8.0), indexing="ij"), -1)
    tokens = picture[:, :, ::2, ::2].flatten(2).mT
    return model(
        tokens, text, pooled, times.float(), img_ids=at.view(-1, 3), txt_ids=torch.zeros(24, 3), guidance=None
    ).sample


def masked(
    pattern: Pattern, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **how: object
) -> Tensor:
    """Dense attention, with the pattern as a mask if there are as many queries as keys."""
    if query.shape[2] == key.shape[2]:
        kept = kept_pairs(pattern, query, key)
        if attn_mask is not None:
            kept = kept & (attn_mask if attn_mask.dtype == torch.bool else attn_mask == 0)
        attn_mask = kept
    return DENSE(query, key, value, attn_mask=attn_mask, **how)


SELF_ATTENTION = [(unet, 4, 4), (flux, 2, 0), (stable_diffusion_3, 2, 0), (wan, 1, 1)]


@pytest.mark.parametrize(("make", "count", "cross"), SELF_ATTENTION)
def test_a_model_is_that_with_the_pattern_as_a_mask(
    make: Callable[[], nn.Module], count: int, cross: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make().train()
    plain = images(model)
    with monkeypatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", partial(masked, PATTERN))
        expected = images(model)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    cotangent = torch.randn_like(plain)
    wanted = torch.autograd.grad(expected, weights, cotangent, allow_unused=True, materialize_grads=True)

    before = model.attn_processors
    names = use_ringtile(model, PATTERN)
    after = model.attn_processors
    assert (len(names), len(after) - len(names)) == (count, cross)
    assert [name for name in after if after[name] is not before[name]] == names

    out = images(model)
    assert relative_error(out, expected) < 2e-6
    assert relative_error(out, plain) > 1e-3
    found = torch.autograd.grad(out, weights, cotangent, allow_unused=True, materialize_grads=True)
    assert relative_error(torch.cat([g.flatten() for g in found]), torch.cat([g.flatten() for g in wanted])) < 2e-6

    use_ringtile(model, Window(256))
    again = model.attn_processors
    assert all(again[name].processor is before[name] for name in names)
    assert relative_error(images(model), plain) < 2e-6


class Masked:
    """A processor that hands on a mask."""

    def __init__(self, mask: Tensor, **how: object) -> None:
        self.mask, self.how = mask, how

    def __call__(self, attn: object, hidden_states: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*[hidden_states] * 3, attn_mask=self.mask, **self.how)


def as_scores(kept: Tensor, dropped: float) -> Tensor:
    return torch.zeros(kept.shape, dtype=torch.float64).masked_fill_(~kept, dropped)


@pytest.mark.parametrize(
    "shape", [(150,), (150, 150), (2, 1, 1, 150), (2, 3, 1, 150), (1, 3, 1, 150), (2, 1, 150, 150), (2, 3, 150, 150)]
)
@pytest.mark.parametrize("dropped", [None, -10_000.0, -torch.inf])
def test_each_bit_of_a_mask_is_seen(shape: tuple[int, ...], dropped: float | None) -> None:
    x = torch.randn(2, 3, 150, 8, dtype=torch.float64)
    kept = torch.rand(shape) < 0.6
    outs = []
    for _ in range(2):
        mask = kept if dropped is None else as_scores(kept, dropped)
        outs.append(SparseAttnProcessor(Masked(mask), PATTERN)(None, x))
        assert relative_error(outs[-1], masked(PATTERN, x, x, x, attn_mask=kept)) < 1e-12
        kept = kept.clone()
        kept.view(-1)[77] ^= True
        if len(shape) > 1 and shape[-2] == 150:
            kept[..., 77, 77] ^= True
    assert relative_error(outs[1], outs[0]) > 1e-4


def test_a_mask_that_diffusers_repeats_for_its_heads_is_a_mask_of_keys() -> None:
    attention = processors.Attention(query_dim=16, heads=2, dim_head=8)
    x, kept = torch.randn(2, 150, 16), torch.rand(2, 1, 150) < 0.6
    scores = (~kept) * -10_000.0
    plain = attention(x, attention_mask=scores)
    attention.set_processor(SparseAttnProcessor(processors.AttnProcessor2_0(), Window(150)))
    assert relative_error(attention(x, attention_mask=scores), plain) < 1e-6
    with refused("attn_mask: expected bool, or 0 and values up to -10000"):
        attention(x, attention_mask=scores / 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_mask_in_half_precision_drops_the_same_keys(dtype: torch.dtype) -> None:
    x, kept = torch.randn(2, 3, 150, 8).to(dtype), torch.rand(2, 1, 1, 150) < 0.6
    scores = (1 - kept.to(dtype)) * -10_000.0
    outs = [SparseAttnProcessor(Masked(mask), PATTERN)(None, x) for mask in (scores, kept)]
    assert torch.equal(*outs)


def test_options_of_the_call_arrive() -> None:
    x = torch.randn(2, 3, 150, 8, dtype=torch.float64)
    causal = SparseAttnProcessor(Masked(None, is_causal=True, scale=0.7), PATTERN)(None, x)
    assert relative_error(causal, masked(Causal() & PATTERN, x, x, x, scale=0.7)) < 1e-12
    dropped = SparseAttnProcessor(Masked(None, dropout_p=0.9), PATTERN)(None, x)
    assert relative_error(dropped, masked(PATTERN, x, x, x)) > 0.1


def test_what_cannot_be_honored_is_refused() -> None:
    attention = processors.Attention(query_dim=16, heads=2, dim_head=8)
    x = torch.randn(2, 150, 16)
    attention.set_processor(SparseAttnProcessor(processors.AttnProcessor2_0(), PATTERN))
    with refused("pattern: expected as many queries as keys"):
        attention(x, encoder_hidden_states=x[:, :7])
    attention.processor._parallel_config = object()
    with refused("context parallelism: not supported"):
        attention(x)
    attention.set_processor(SparseAttnProcessor(processors.AttnProcessor(), PATTERN))
    with refused("processor: AttnProcessor did not call scaled_dot_product_attention"):
        attention(x)
    with refused("processor: expected one without weights, got the module IPAdapter"):
        SparseAttnProcessor(processors.IPAdapterAttnProcessor2_0(16, 16), PATTERN)
    with refused("pattern: expected a Pattern or its text, got int"):
        SparseAttnProcessor(processors.AttnProcessor2_0(), 128)
    with refused("model: expected one of diffusers, with self-attention, got Linear"):
        use_ringtile(nn.Linear(2, 2), PATTERN)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_another_backend_of_diffusers_is_refused() -> None:
    model = flux()
    use_ringtile(model, PATTERN)
    with torch.no_grad(), diffusers.attention_backend("flex"):
        with refused("FluxAttnProcessor did not call scaled_dot_product_attention"):
            images(model)
    torch.compiler.reset()


def test_the_wrapped_processor_has_the_signature_and_copies() -> None:
    processor = SparseAttnProcessor(processors.AttnProcessor2_0(), PATTERN)
    assert inspect.signature(processor.__call__) == inspect.signature(processors.AttnProcessor2_0().__call__)
    for twin in (copy.deepcopy(processor), pickle.loads(pickle.dumps(processor))):
        assert type(twin) is type(processor)
        assert twin.pattern == PATTERN
        assert twin.processor is not processor.processor


def test_checkpointing_recomputes_over_the_pattern() -> None:
    model = wan().train()
    use_ringtile(model, PATTERN)
    results = []
    for _ in range(2):
        out = images(model)
        results.append((out, *torch.autograd.grad(out.sum(), model.parameters(), allow_unused=True)))
        model.enable_gradient_checkpointing()
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated:DeprecationWarning")
def test_one_graph() -> None:
    attention = processors.Attention(query_dim=16, heads=2, dim_head=8)
    attention.set_processor(SparseAttnProcessor(processors.AttnProcessor2_0(), PATTERN))
    x, heads = torch.randn(2, 150, 16), torch.randn(2, 3, 150, 8)
    assert torch.equal(torch.compile(attention, backend="eager", fullgraph=True)(x), attention(x))
    keys = SparseAttnProcessor(Masked(torch.rand(2, 1, 1, 150) < 0.5), PATTERN)
    compiled = torch.compile(lambda x: keys(None, x), backend="eager", fullgraph=True)
    assert torch.equal(compiled(heads), keys(None, heads))
    for mask, complaint in ((torch.zeros(2, 1, 1, 150), "got mask.dtype"), (torch.ones(150, 150) > 0, "mask per key")):
        pairs = SparseAttnProcessor(Masked(mask), PATTERN)
        with pytest.raises(Exception, match=complaint):
            torch.compile(lambda x, pairs=pairs: pairs(None, x), backend="eager", fullgraph=True)(heads)
    torch.compiler.reset()


def test_the_module_imports_no_diffusers() -> None:
    assert not re.search(r"^\s*(import|from) diffusers", inspect.getsource(integration), re.M)
