"""The models that `scripts/drift.py` runs on a changed transformers, with eager attention and with ringtile.

A name that a change gives to an argument or a field of transformers is changed here too: this file is its user. The
calls of ringtile are in `drift.py`, since its names stay.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from tiny import BIASED, ENCODER, MODELS, SPARSE, WINDOWED, hf
from torch import Tensor

TOKENS = 29
Run = Callable[[Any, Any], list[Tensor]]


class Case(NamedTuple):
    """A model, and what a user does with it."""

    make: Callable[[], tuple[type, Any]]
    run: Run
    """Computes with the model, and with what the door returned: None for eager attention."""
    door: str = "use_ringtile"
    """How ringtile gets the model: a name of `drift.DOORS`."""
    tolerance: float = 1e-9


def built(case: Case, attention: str = "eager") -> Any:
    """Return the model in float64, with weights that make attention sharp."""
    made, config = case.make()
    torch.manual_seed(0)
    model: Any = made._from_config(config, attn_implementation=attention)  # type: ignore[attr-defined]
    if any("experts" in name for name, _ in model.named_modules()):
        # The others have no float64.
        model.set_experts_implementation("eager")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator) * (0.1 if weight.dim() > 1 else 0.3))
        for name, buffer in model.named_buffers():
            if name.endswith("bias"):
                # Routers leave theirs uninitialized.
                buffer.zero_()
    return model.double().eval()


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def tokens(rows: int = 2, n: int = TOKENS) -> Tensor:
    return torch.randint(3, 90, (rows, n), generator=torch.Generator().manual_seed(1))


def padding(n: int = TOKENS, side: str = "left") -> Tensor:
    """Two rows, True for real tokens: the first has a third of padding."""
    mask = torch.ones(2, n, dtype=torch.bool)
    mask[0, : n // 3] = False
    return mask if side == "left" else mask.flip(1)


def padded(model: Any, side: str) -> list[Tensor]:
    mask = padding(side=side)
    return [model(input_ids=tokens(), attention_mask=mask.long())[0][mask]]


def generated(model: Any, ids: Tensor, mask: Tensor, **how: Any) -> list[Tensor]:
    how = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": None} | how
    how |= {"output_logits": True, "return_dict_in_generate": True, "use_cache": True}
    found = model.generate(input_ids=ids, attention_mask=mask.long(), **how)
    return [found.sequences, *found.logits]


def text(model: Any, door: Any, side: str = "left", **how: Any) -> list[Tensor]:
    mask = padding() if side == "left" else padding() | True
    return [*padded(model, side), *generated(model, tokens(), mask, **how)]


def beams(model: Any, door: Any) -> list[Tensor]:
    return generated(model, tokens(), padding(), num_beams=2)[:1]


def static(model: Any, door: Any) -> list[Tensor]:
    return generated(model, tokens(), padding(), cache_implementation="static", disable_compile=True)


def packed(model: Any, door: Any) -> list[Tensor]:
    places = torch.cat([torch.arange(n) for n in (12, 1, 16)]).unsqueeze(0)
    return [model(input_ids=tokens(1), position_ids=places, use_cache=False)[0]]


def encoded(model: Any, door: Any) -> list[Tensor]:
    return padded(model, "right")


def translated(model: Any, door: Any) -> list[Tensor]:
    mask = padding(side="right")
    steps = generated(model, tokens(), mask)
    return [*steps, model(input_ids=tokens(), attention_mask=mask.long(), decoder_input_ids=tokens(n=7))[0]]


def looked_at(model: Any, door: Any) -> list[Tensor]:
    ids = tokens()
    ids[:, 12:28] = 95
    pictures = {"pixel_values": numbers(2, 3, 32, 32), "token_type_ids": (ids == 95).long()}
    return [model(input_ids=ids, attention_mask=padding(side="right").long(), **pictures)[0][1]]


def heard(model: Any, door: Any) -> list[Tensor]:
    return [model(input_values=numbers(2, 120), attention_mask=padding(120, "right").long())[0]]


def frames(model: Any, door: Any, real: int = 1) -> list[Tensor]:
    mask = padding(4 * TOKENS, "right")
    return [model(input_features=numbers(2, 4 * TOKENS, 16), attention_mask=mask.long())[0][mask[:, ::real]]]


def conformed(model: Any, door: Any) -> list[Tensor]:
    return [model(hidden_states=numbers(2, 4 * TOKENS, 16))[0]]


def seen(model: Any, door: Any) -> list[Tensor]:
    return [model(pixel_values=numbers(1, 3, 22, 22))[0]]


def far(model: Any, door: Any) -> list[Tensor]:
    mask, at_global = padding(side="right"), torch.zeros(2, TOKENS, dtype=torch.long)
    at_global[:, :2] = 1
    return [model(input_ids=tokens(), attention_mask=mask.long(), global_attention_mask=at_global)[0]]


def long(model: Any, door: Any) -> list[Tensor]:
    return [model(input_ids=tokens(2, 192), attention_mask=padding(192, "right").long())[0]]


def sparse(model: Any, door: Any, side: str = "left") -> list[Tensor]:
    return [*text(model, door, side), model(input_ids=tokens())[0]]


def served(model: Any, door: Any, rounding: float = 0.0) -> list[Tensor]:
    prompts = [tokens(1, n)[0].tolist() for n in (5, 27, 5)]
    how = hf.GenerationConfig(max_new_tokens=3, do_sample=False, eos_token_id=-1, pad_token_id=0)
    memory = hf.ContinuousBatchingConfig(page_size=8, max_batch_tokens=16, num_blocks=32, return_logprobs=True)
    # Of eager attention, too: what transformers cannot serve by itself is void.
    results = model.generate_batch(prompts, generation_config=how, continuous_batching_config=memory)
    found = [results[name] for name in sorted(results, key=lambda name: int(name.split("_")[-1]))]
    if errors := [result.error for result in found if result.error]:
        raise RuntimeError(errors[0])
    logs = [torch.tensor(result.logprobs, dtype=torch.float64) for result in found]
    for n, prompt in enumerate(prompts if door is None else ()):
        ids = torch.tensor([prompt])
        alone, *logits = generated(model, ids, ids > 0)
        words = zip(logits, alone[0, len(prompt) :], strict=True)
        expected = torch.stack([x[0].log_softmax(0)[word] for x, word in words])
        torch.testing.assert_close(logs[n], expected, rtol=0, atol=1e-4)
        logs[n] = expected
    # Rounded keys can change a token, and with it what comes after it.
    return [each[: 1 if rounding else None] for each in logs]


def shared(model: Any, door: Any) -> list[Tensor]:
    batch = {"input_ids": tokens(), "attention_mask": padding().long()}
    mask = padding()
    return [model(**(batch if door is None else door.shard_batch(batch)))[0][mask]]


def pooled(model: Any, door: Any) -> list[Tensor]:
    mask = padding(side="right")
    found = model(input_ids=tokens(), attention_mask=mask.long())
    return [found.last_hidden_state[mask], found.pooler_output]


def longer(model: Any, door: Any) -> list[Tensor]:
    return generated(model, tokens(2, 40), padding(40))


def whole(model: Any, door: Any) -> list[Tensor]:
    return [model(input_ids=tokens())[0]]


def of(name: str) -> Callable[[], tuple[type, Any]]:
    return (MODELS | BIASED | WINDOWED | SPARSE)[name]


_LONGFORMER = dict(ENCODER, attention_window=[16, 8], max_position_embeddings=258)
_BIG_BIRD = dict(ENCODER, block_size=16, num_random_blocks=2, hidden_dropout_prob=0.0, max_position_embeddings=256)

CASES: dict[str, Case] = {
    "llama": Case(of("Llama"), text),
    "llama by name": Case(of("Llama"), text, "register"),
    "beams": Case(of("Llama"), beams),
    "static cache": Case(of("Llama"), static),
    "mistral": Case(of("Mistral"), text),
    "packed mistral": Case(of("Mistral"), packed),
    "gemma3": Case(of("Gemma3"), text),
    "gemma3 with images": Case(of("Gemma3 with images"), looked_at),
    "gpt-oss": Case(of("gpt-oss"), text),
    "llama4": Case(of("Llama 4"), text),
    "packed llama4": Case(of("Llama 4"), packed),
    "gemma2": Case(of("Gemma2"), text),
    "modernbert": Case(of("ModernBERT"), encoded),
    "bart": Case(of("BART"), translated),
    "t5": Case(of("T5"), translated),
    "mpt": Case(of("MPT"), text),
    "bloom": Case(of("BLOOM"), text),
    "deberta": Case(of("DeBERTa-v2"), encoded),
    "mpnet": Case(of("MPNet"), encoded),
    "wavlm": Case(of("WavLM"), heard),
    "conformer": Case(of("wav2vec2-conformer"), heard),
    "w2v-bert": Case(of("w2v-BERT"), frames),
    "parakeet": Case(of("Parakeet"), partial(frames, real=4)),
    "granite speech": Case(of("Granite Speech"), conformed),
    "swin": Case(of("Swin"), seen),
    "swin v2": Case(of("Swin v2"), seen),
    "longformer": Case(lambda: (hf.LongformerForMaskedLM, hf.LongformerConfig(**_LONGFORMER)), far),
    "big bird": Case(lambda: (hf.BigBirdForMaskedLM, hf.BigBirdConfig(**_BIG_BIRD)), long),
    "deepseek v3.2": Case(of("deepseek_v32"), sparse),
    "deepseek v4": Case(of("deepseek_v4"), sparse),
    "minimax m3": Case(of("minimax_m3_vl"), partial(sparse, side="right")),
    "glm5 next": Case(of("glm5_next"), sparse),
    "qwen4": Case(of("qwen4_exp"), sparse),
    "serving": Case(of("Mistral"), served, "serving", 1e-6),
    "serving llama": Case(of("Llama"), served, "serving", 1e-6),
    "serving int8": Case(of("Llama"), partial(served, rounding=1.0), "serving int8", 0.1),
    "decode": Case(of("Llama"), longer, "decode"),
    "pack": Case(lambda: (hf.BertModel, MODELS["BERT"]()[1]), pooled, "pack"),
    "context parallel": Case(of("Mistral"), shared, "context parallel"),
    "calibrate": Case(of("Llama"), whole, "calibrate"),
    "losses deepseek v3.2": Case(of("deepseek_v32"), whole, "losses"),
    "losses deepseek v4": Case(of("deepseek_v4"), whole, "losses"),
    "losses minimax m3": Case(of("minimax_m3_vl"), whole, "losses"),
    "losses glm5 next": Case(of("glm5_next"), whole, "losses"),
    "losses qwen4": Case(of("qwen4_exp"), whole, "losses"),
}
