"""Continuous batching of transformers: the tokens and probabilities of each request alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_transformers import randomized
from tiny import config_of
from transformers import ContinuousBatchingConfig, GenerationConfig

from ringtile.functional.attention import sparse_attention
from ringtile.integrations.transformers import continuous_batching, use_ringtile

STEPS = 6
LENGTHS = (5, 40, 5, 5, 17)


def built(name: str, **change: Any) -> Any:
    made, config = config_of(name, **change)
    torch.manual_seed(0)
    model = made._from_config(config, attn_implementation="eager")
    # Experts have no float64 otherwise.
    model.set_experts_implementation("eager")
    return randomized(model).double()


def prompts() -> list[list[int]]:
    return [torch.randint(3, 97, (n,)).tolist() for n in LENGTHS]


def served(model: Any, given: list[list[int]], tokens: int = 64) -> list[Any]:
    """The results by request, of steps of at most so many tokens: longer prompts come in parts."""
    how = GenerationConfig(max_new_tokens=STEPS, do_sample=False, eos_token_id=-1, pad_token_id=0)
    memory = ContinuousBatchingConfig(page_size=8, max_batch_tokens=tokens, num_blocks=64, return_logprobs=True)
    with continuous_batching(model):
        found = model.generate_batch(given, generation_config=how, continuous_batching_config=memory)
    return [found[name] for name in sorted(found, key=lambda name: int(name.split("_")[-1]))]


def compare(model: Any, tokens: int = 64) -> None:
    given = prompts()
    options = {"max_new_tokens": STEPS, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    for prompt, mine in zip(given, served(model, given, tokens), strict=True):
        alone = model.generate(torch.tensor([prompt]), output_logits=True, return_dict_in_generate=True, **options)
        expected = alone.sequences[0, len(prompt) :]
        assert mine.prompt_ids == prompt
        assert mine.generated_tokens == expected.tolist()
        logs = torch.stack(alone.logits)[:, 0].log_softmax(1)[torch.arange(STEPS), expected]
        torch.testing.assert_close(torch.tensor(mine.logprobs, dtype=logs.dtype), logs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("tokens", [16, 128])
@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma2", "gpt-oss", "Qwen3"])
def test_requests_together_get_what_each_gets_alone(name: str, tokens: int) -> None:
    compare(built(name), tokens)


@pytest.mark.parametrize(("name", "pattern"), [("Llama", "window(9) | global_tokens(2)"), ("Mistral", "window(4)")])
def test_patterns_are_kept(name: str, pattern: str) -> None:
    model = use_ringtile(built(name), pattern)
    compare(model, 16)
    assert model.config._attn_implementation == "use_ringtile"


def test_requests_of_equal_lengths_are_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = []

    def counted(query: Any, *given: Any, **named: Any) -> Any:
        shapes.append(tuple(query.shape))
        return sparse_attention(query, *given, **named)

    monkeypatch.setattr("ringtile.integrations.transformers.serving.sparse_attention", counted)
    served(built("Llama"), [[5] * 7, [6] * 7, [7] * 7, [8] * 9])
    assert (3, 4, 7, 16) in shapes
    assert (3, 4, 1, 16) in shapes
    assert (1, 4, 9, 16) in shapes


def test_what_cannot_be_served_is_refused() -> None:
    model = built("Llama")
    with pytest.raises(ValueError, match="cache: expected a call of continuous batching"), continuous_batching(model):
        model(torch.randint(3, 97, (1, 9)))
    assert model.config._attn_implementation == "eager"
    adaptive = use_ringtile(built("Llama"), attend=lambda *given, **named: sparse_attention(*given, **named))
    with pytest.raises(ValueError, match="attend: expected None"), continuous_batching(adaptive):
        pass


def test_a_window_has_forgotten_what_a_pattern_keeps() -> None:
    model = use_ringtile(built("Mistral"), "window(9) | global_tokens(2)")
    assert all("expected one that moves along" in each.error for each in served(model, prompts()))


def test_kinds_of_layers_without_a_paged_cache() -> None:
    with pytest.raises(ValueError, match="chunked_attention"):
        served(built("Llama 4"), prompts())
