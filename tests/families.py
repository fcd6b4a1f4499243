"""Models of transformers by name: with eager attention and on ringtile, a batch of inputs, and what to compare."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from tiny import BIASED, JOINED, MODELS, SPARSE, WINDOWED, Doubled, config_of, hf
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ringtile.integrations.transformers import register, registry, use_ringtile
from ringtile.integrations.transformers.masks import CHOSEN, pattern_mask

ALL = MODELS | JOINED | BIASED | WINDOWED | SPARSE
TOKENS = 61
T5_FAMILY = ["T5", "mT5", "UMT5", "LongT5", "Switch", "Pop2Piano"]
WITHOUT_A_MASK = ["Granite Speech", "Granite Speech Plus"]
SPEECH = ["w2v-BERT", "w2v-BERT, relative", "SeamlessM4T", "SeamlessM4T v2", "Parakeet", "Granite Speech 5"]
SPEECH += WITHOUT_A_MASK
WAVES = ["wav2vec2-conformer", "WavLM"]
NO_EAGER = ("Gemma 4", "SeamlessM4T v2")
"""Models whose eager attention has no float64, or adds a bool mask to the scores: 1 for each pair that it keeps."""
PLACES = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in ([30, 1, 30], [7, 54], [61])])
"""Positions of packed documents."""


@contextmanager
def registered() -> Iterator[None]:
    """Have the names of ringtile in transformers for a while."""
    register()
    # Models of earlier tests have the name of `use_ringtile`.
    registry.register_pair(CHOSEN, registry._attend_chosen, pattern_mask)
    yield
    # A mapping per class, for all models: leave it as it was.
    for interface in (hf.AttentionInterface, hf.AttentionMaskInterface):
        for name in [name for name in interface._global_mapping if "ringtile" in name]:
            del interface._global_mapping[name]


def graph_counter() -> Any:
    """A backend of `torch.compile` that counts its graphs. Its module loads compilers."""
    from torch._dynamo.testing import CompileCounter

    return CompileCounter()


class Largest(TorchDispatchMode):
    """The size of the largest storage that operations return, in elements of four bytes."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                self.most = max(self.most, x.untyped_storage().nbytes() // 4)
        return out


def randomized(model: nn.Module) -> Any:
    """Weights that make attention sharp, sinks and biases included."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator) * (0.1 if weight.dim() > 1 else 0.3))
    return model.eval()


def model_of(made: Any, config: Any, attention: str, dtype: torch.dtype = torch.float32) -> Any:
    """A model, whose attention is that of a name or of `use_ringtile`."""
    torch.manual_seed(0)
    own = "eager" if attention == "use_ringtile" else attention
    model = made._from_config(copy.deepcopy(config), attn_implementation=own)
    # Experts have no float64 otherwise.
    model.set_experts_implementation("eager")
    model = randomized(model).to(dtype)
    return use_ringtile(model) if attention == "use_ringtile" else model


def built(name: str, attention: str = "eager", dtype: torch.dtype = torch.float64, **change: Any) -> Any:
    """A model by name, with other values for fields of its configuration."""
    made, config = ALL[name]()
    for field, value in change.items():
        setattr(config.get_text_config(), field, value)
    return model_of(made, config, "sdpa" if name in NO_EAGER and attention == "eager" else attention, dtype)


@cache
def both(name: str, dtype: torch.dtype = torch.float64, how: str = "use_ringtile") -> tuple[Any, Any]:
    """A model with eager attention and the same on ringtile, shared by the tests that change neither."""
    return built(name, dtype=dtype), built(name, how, dtype)


def sharp(name: str = "Llama", dtype: torch.dtype = torch.float32, **change: Any) -> Any:
    """A model whose attention differs from the mean of its values, by random weights that are large."""
    made, config = config_of(name, **change)
    torch.manual_seed(1)
    # Experts have no float64.
    model = made(config).eval().to(torch.float32 if name == "gpt-oss" else dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(3)
    return model


def padding(kind: str, rows: int = 3, tokens: int = TOKENS) -> Tensor:
    """A ragged batch: True for real tokens. The last row has no padding."""
    mask = torch.ones(rows, tokens, dtype=torch.bool)
    for row, count in enumerate((9, 33)):
        mask[row, : count if kind == "left" else 0] = False
        mask[row, tokens - (count if kind == "right" else 0) :] = False
    return mask


def inputs_of(name: str, kind: str, dtype: torch.dtype = torch.float64) -> tuple[dict[str, Any], Tensor]:
    """A ragged batch, or one of packed documents, and the outputs that are real: those of no padding."""
    generator = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype, generator=generator)

    mask, ids = padding(kind), torch.randint(3, 90, (3, TOKENS), generator=generator)
    masks: dict[str, Any] = {} if kind in ("no", "packed") else {"attention_mask": mask.long()}
    if kind == "packed":
        masks = {"position_ids": PLACES, "use_cache": False}
    if name in (*T5_FAMILY, *JOINED, "BART"):
        return {"input_ids": ids, "decoder_input_ids": ids[:, 5:28], **masks}, mask.new_ones(3, 23)
    if name == "ViT":
        return {"pixel_values": drawn(2, 3, 32, 32)}, mask.new_ones(2, 65)
    if name == "Whisper":
        return {"input_features": drawn(3, 16, 100), "decoder_input_ids": ids[:, :20]}, mask.new_ones(3, 20)
    if name in ("Gemma3 with images", "LLaVA"):
        # 16 tokens per image, which attend to one another in Gemma3.
        ids[:, 40:56] = 95
        masks["pixel_values"] = drawn(3, 3, 32, 32)
        if name != "LLaVA":
            masks["token_type_ids"] = (ids == 95).long()
    if name in WINDOWED:
        height, width = {"CLAP": (64, 16), "Swin2SR": (12, 12)}.get(name, (22, 22))
        field, channels = ("input_features", 1) if name == "CLAP" else ("pixel_values", 3)
        return {field: drawn(2, channels, height, width)}, mask.new_ones(2)
    if name in WAVES:
        # It drops padding on the left by the number of samples, and mixes padding by its convolutions.
        return {"input_values": drawn(3, 250), **({"attention_mask": padding(kind, 3, 250).long()} if masks else {})}, (
            mask.new_ones(3, TOKENS)
        )
    if name in SPEECH:
        frames = drawn(3, 4 * TOKENS, 16)
        if name in WITHOUT_A_MASK:
            return {"hidden_states": frames}, mask.new_ones(3, 4 * TOKENS)
        # They count the samples that are real, and take as many from the left.
        of_left = name in ("Parakeet", "SeamlessM4T v2") and masks
        real = padding("right" if of_left else kind, 3, 4 * TOKENS)
        halves = real[:, ::2] & real[:, 1::2]
        kept = {"Granite Speech 5": halves, "SeamlessM4T": halves.new_ones(3, 2 * TOKENS + 1), "Parakeet": real[:, ::4]}
        kept["SeamlessM4T v2"] = F.pad(real[:, ::2], (0, 1))
        masks = {"attention_mask": real.long()} if masks else {}
        return {"input_features": frames, **masks}, kept.get(name, real)
    return {"input_ids": ids, **masks}, mask


def outcome(model: Any, real: Tensor, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """The real outputs, and the gradients of all parameters."""
    model.zero_grad()
    output = model(**inputs)[0]
    assert output.shape[: real.dim()] == real.shape
    output[real].backward(torch.randn(output[real].shape, generator=torch.Generator().manual_seed(2)).to(output.dtype))
    grads = {name: weight.grad.double() for name, weight in model.named_parameters() if weight.grad is not None}
    return {"output": output[real].detach().double(), **grads}


def error_of(found: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    """The largest difference of an output, or of a gradient in parts of the largest."""
    assert found.keys() == truth.keys()
    errors = [float((found["output"] - truth["output"]).abs().max())]
    for name, grad in list(truth.items())[1:]:
        # A bias counts with its weights: that of keys has a gradient of exactly zero, and only rounding differs.
        scale = max(truth.get(other, grad).abs().max() for other in (name, name.removesuffix("bias") + "weight"))
        errors.append(float((found[name] - grad).abs().max() / scale) if scale > 0 else float(found[name].abs().max()))
    return max(errors)


def assert_equal_models(first: Any, second: Any, real: Tensor, tolerance: float, **inputs: Any) -> None:
    """The same outputs for real tokens, and the same gradients."""
    with Doubled():
        found, truth = (outcome(model, real, inputs) for model in (second, first))
    assert error_of(found, truth) <= tolerance
