"""Continuous batching of transformers: the tokens and probabilities of each request alone."""

from __future__ import annotations

import inspect
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import built
from oracle import SDPA_BUDGET, assert_near, oracle, refused, relative_error, sdpa_low_precision_error
from tiny import config_of
from torch import Tensor
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import cache as pages
from transformers.generation.continuous_batching.requests import RequestState

from ringtile.functional.attention import sparse_attention
from ringtile.integrations.transformers import continuous_batching, use_ringtile
from ringtile.integrations.transformers.rounded_pages import restored, rounded
from ringtile.integrations.transformers.serving import _attend_paged, _found_pages
from ringtile.patterns import Causal, Window

if "kwargs" not in inspect.signature(pages.PagedAttentionCache.update).parameters:
    pytest.skip("continuous batching needs transformers 5.19 or newer", allow_module_level=True)

STEPS = 6
LENGTHS = (5, 40, 5, 5, 17)
SERVING = "ringtile.integrations.transformers.serving"


@pytest.fixture(autouse=True)
def caches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The caches that transformers makes. All that nobody has written there is NaN."""
    found: list[Any] = []
    make = pages.PagedAttentionCache.__init__

    def poisoned(self: Any, *given: Any, **named: Any) -> None:
        make(self, *given, **named)
        self.cache_tensor.fill_(255)
        found.append(self)

    monkeypatch.setattr(pages.PagedAttentionCache, "__init__", poisoned)
    return found


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, Tensor]]:
    """The queries and keys of all calls of attention."""
    found = []

    def seen(query: Tensor, key: Tensor, *given: Any, **named: Any) -> Any:
        found.append((query, key))
        return sparse_attention(query, key, *given, **named)

    monkeypatch.setattr(f"{SERVING}.sparse_attention", seen)
    return found


def prompts() -> list[list[int]]:
    return [torch.randint(3, 97, (n,)).tolist() for n in LENGTHS]


def served(model: Any, given: list[list[int]], tokens: int = 64, **how_held: Any) -> list[Any]:
    """The results by request, of steps of at most so many tokens: longer prompts come in parts."""
    how = GenerationConfig(max_new_tokens=STEPS, do_sample=False, eos_token_id=-1, pad_token_id=0)
    memory = ContinuousBatchingConfig(page_size=8, max_batch_tokens=tokens, num_blocks=64, return_logprobs=True)
    with continuous_batching(model, **how_held):
        found = model.generate_batch(given, generation_config=how, continuous_batching_config=memory)
    return [found[name] for name in sorted(found, key=lambda name: int(name.split("_")[-1]))]


def compare(model: Any, tokens: int = 64, given: Any = None) -> None:
    given = prompts() if given is None else given
    options = {"max_new_tokens": STEPS, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    for prompt, mine in zip(given, served(model, given, tokens), strict=True):
        alone = model.generate(torch.tensor([prompt]), output_logits=True, return_dict_in_generate=True, **options)
        expected = alone.sequences[0, len(prompt) :]
        assert mine.prompt_ids == prompt
        assert mine.generated_tokens == expected.tolist()
        logs = torch.stack(alone.logits)[:, 0].log_softmax(1)[torch.arange(STEPS), expected]
        assert_near(torch.tensor(mine.logprobs, dtype=logs.dtype), logs, 1e-6)


@pytest.mark.parametrize(
    ("name", "tokens"), [*((name, 16) for name in ("Mistral", "Gemma2", "gpt-oss")), ("Llama", 128), ("Mistral", 128)]
)
def test_requests_together_get_what_each_gets_alone(name: str, tokens: int) -> None:
    compare(built(name), tokens)


@pytest.mark.parametrize(("name", "pattern"), [("Llama", "window(9) | global_tokens(2)"), ("Mistral", "window(4)")])
def test_patterns_are_kept(name: str, pattern: str) -> None:
    model = use_ringtile(built(name), pattern)
    compare(model, 16)
    assert model.config._attn_implementation == "use_ringtile"


def test_requests_of_equal_lengths_are_one_call(calls: list[tuple[Tensor, Tensor]]) -> None:
    # With a pattern, keys are gathered.
    served(use_ringtile(built("Llama"), "window(64)"), [[5] * 7, [6] * 7, [7] * 7, [8] * 9])
    shapes = [tuple(query.shape) for query, _ in calls]
    assert (3, 4, 7, 16) in shapes
    assert (3, 4, 1, 16) in shapes
    assert (1, 4, 9, 16) in shapes


def test_steps_of_one_query_read_the_pages_where_they_lie(calls: list[tuple[Tensor, Tensor]], caches: Any) -> None:
    compare(built("Llama"), 128)
    # The two heads of each key head are two queries.
    steps = [key for query, key in calls if query.shape[1:3] == (2, 2)]
    # 5 + 1, 40 + 1 and 17 + 1 tokens in pages of 8.
    assert steps[0].shape == (1 + 6 + 1 + 1 + 3, 2, 8, 16)
    assert len(steps) == 2 * (STEPS - 1)
    assert all(key.untyped_storage().data_ptr() == caches[0].cache_tensor.data_ptr() for key in steps)


def test_requests_that_share_pages(calls: list[tuple[Tensor, Tensor]]) -> None:
    common = torch.randint(3, 97, (24,)).tolist()
    compare(built("Llama"), 32, [[*common, *more] for more in ([5], [6, 7], [8, 9, 10])])
    gathered = [key for query, key in calls if query.shape[1:3] == (2, 2) and key.shape[2] > 8]
    assert gathered


def steps_through_a_cache(
    name: str, dtype: torch.dtype, rounding: str | None, lengths: list[tuple[int, ...]], **options: Any
) -> list[tuple[Tensor, list[Any]]]:
    """The output of each step in layer 1 of a cache, and for each request its queries and all its keys and values.

    ``lengths`` has the new tokens of each request in each step.
    """
    config = config_of(name)[1]
    config._attn_implementation_internal = "ringtile_flash" + (f"_{rounding}" if rounding else "")
    from transformers.generation.continuous_batching.distributed import DistributedHelper

    with continuous_batching(built(name), cache=rounding):  # type: ignore[arg-type]
        pass
    sizes = ContinuousBatchingConfig(page_size=16, num_blocks=40, max_batch_tokens=256, max_memory_percent=0.5)
    cache = pages.PagedAttentionCache(config, sizes, "cpu", DistributedHelper(None, None), dtype)
    states = [RequestState(request_id=str(n), initial_tokens=[]) for n in range(len(lengths[0]))]
    held: list[Any] = [None] * len(states)
    module: Any = SimpleNamespace(layer_idx=1)
    record, found = cache.layer_to_allocator[1], []
    for step in lengths:
        new = [torch.randn(1, heads, sum(step), 16, dtype=torch.float64).to(dtype) for heads in (4, 2, 2)]
        read: list[list[int]] = [[] for _ in cache.cache_allocators]
        write: list[list[int]] = [[] for _ in cache.cache_allocators]
        given, n_keys = [], []
        for n, (state, *own) in enumerate(zip(states, *(x.split(step, 2) for x in new), strict=True)):
            assert cache.can_store_request_tokens(state, step[n])
            past = state.position_offset
            cache.extend_read_and_write_indices(state.request_id, past, step[n], read, write)
            n_keys.append(record.get_seqlen_k(past, step[n]))
            state.position_offset += step[n]
            held[n] = own[1:] if past == 0 else [torch.cat(pair, 2) for pair in zip(held[n], own[1:], strict=True)]
            given.append((own[0], *held[n]))
        out, _ = _attend_paged(
            module,
            *new,
            None,
            cache=cache,
            read_index=[torch.tensor(each) for each in read],
            write_index=[torch.tensor(each) for each in write],
            cu_seq_lens_q=torch.tensor([0, *step]).cumsum(0).int(),
            cu_seq_lens_k={record.layer_type: torch.tensor([0, *n_keys]).cumsum(0).int()},
            max_length_k={record.layer_type: max(n_keys)},
            **options,
        )
        assert out.dtype == dtype
        found.append((out, given))
    return found


STEPS_OF_REQUESTS = [(33, 1, 16, 47), (1, 1, 1, 1), (1, 9, 1, 3), (1, 1, 1, 1)]


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_steps_have_the_error_of_torch(dtype: torch.dtype, with_sinks: bool, calls: Any) -> None:
    sinks = torch.randn(4, dtype=torch.float64).to(dtype) if with_sinks else None
    errors, budgets = [], []
    for out, given in steps_through_a_cache("Llama", dtype, None, STEPS_OF_REQUESTS, s_aux=sinks):
        for found, each in zip(out.split([q.shape[2] for q, _, _ in given], 1), given, strict=True):
            errors.append(relative_error(found.transpose(1, 2), oracle(*each, Causal(), sinks=sinks).out))
            budgets.append(sdpa_low_precision_error(*each, Causal(), torch.zeros_like(each[0])).out)
    if dtype == torch.float64:
        assert max(errors) < 1e-14
    else:
        # A sink scales the output, which is rounded once more.
        assert max(errors) <= SDPA_BUDGET[dtype] * max(budgets) * (2 if with_sinks else 1)
    in_place = [key for query, key in calls if key.shape[2] == 16 and query.shape[2] == 2 and len(key) > 4]
    # In half types, the rounded outputs of pages would be too far off.
    assert len(in_place) == (2 if dtype in (torch.float32, torch.float64) else 0)


def test_pages_that_lie_too_far_apart_or_belong_to_two_are_gathered() -> None:
    made = SimpleNamespace(tokens_per_page=8, block_physical_stride=32, supports_block_table=True)
    one_each = torch.arange(3)
    assert _found_pages(made, torch.tensor([0, 32]), one_each, torch.tensor([0, 1, 2])) is not None
    assert _found_pages(made, torch.tensor([0, 128]), one_each, torch.tensor([0, 1, 2])) is None
    assert _found_pages(made, torch.tensor([32, 32]), one_each, torch.tensor([0, 1, 2])) is None
    assert _found_pages(made, torch.tensor([0, 32, 33]), torch.tensor([0, 1, 3]), torch.tensor([0, 1, 3])) is None


ROUNDINGS = {"bfloat16": torch.bfloat16, "int8": torch.int8}


def test_int8_rounds_by_half_a_step() -> None:
    x = torch.randn(3, 50, 7) * 10 ** torch.linspace(-6, 6, 50).unsqueeze(1)
    x[0, 0] = 0
    held = rounded(x, torch.int8)
    assert held.shape == (3, 50, 7 + 4)
    found = restored(held, torch.float32)
    assert ((found - x).abs() <= x.abs().amax(-1, keepdim=True) * (1 / 254 + 1e-6)).all()
    # The largest number of a token and head has all 127 steps, and another token changes nothing.
    assert held[..., :-4].abs().amax(-1)[x.any(-1)].eq(127).all()
    assert torch.equal(restored(rounded(x[:, 7:8], torch.int8), torch.float32), found[:, 7:8])
    x[1, 2, 3] = math.inf
    assert not restored(rounded(x, torch.int8), torch.float32)[1, 2].isfinite().all()


def simply_rounded(x: Tensor, rounding: str) -> Tensor:
    """What a page may return: the nearest bfloat16, or the nearest of 255 steps of a float32 scale."""
    if rounding == "bfloat16":
        return x.bfloat16().to(x.dtype)
    step = (x.abs().max(dim=-1, keepdim=True).values / 127).float().to(x.dtype)
    return torch.round(x / step) * step


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize(("name", "window"), [("Llama", None), ("Mistral", 20)])
def test_rounded_pages_lose_what_rounding_of_keys_and_values_loses(
    name: str, window: int | None, rounding: str
) -> None:
    rule = Causal() if window is None else Causal() & Window(window - 1)
    kept, lost = [], []
    for out, given in steps_through_a_cache(
        name, torch.float64, rounding, STEPS_OF_REQUESTS, sliding_window=window, softcap=3.0, s_aux=torch.arange(4.0)
    ):
        for found, (q, k, v) in zip(out.split([q.shape[2] for q, _, _ in given], 1), given, strict=True):
            how = {"softcap": 3.0, "sinks": torch.arange(4.0)}
            near = oracle(q, simply_rounded(k, rounding), simply_rounded(v, rounding), rule, **how).out
            kept.append(relative_error(found.transpose(1, 2), near))
            lost.append(relative_error(near, oracle(q, k, v, rule, **how).out))
    assert max(kept) < 1e-6
    assert min(lost) > 1e-4
    assert max(lost) < 0.01


@pytest.mark.parametrize(("rounding", "bytes_of_head"), [(None, 64), ("bfloat16", 32), ("int8", 20)])
def test_memory_of_rounded_pages(rounding: Any, bytes_of_head: int, caches: Any, calls: Any) -> None:
    served(built("Llama").float(), prompts(), cache=rounding)
    (cache,) = caches
    (held,) = cache.cache_allocators.values()
    # 2 layers of keys and values, of 2 heads, for 8 tokens a page.
    assert held.bytes_per_block == 2 * 2 * 2 * bytes_of_head * 8
    # As much memory as 64 pages of float32, rounded up to a page, and two that transformers adds.
    assert held.num_blocks == math.ceil(64 * 64 / bytes_of_head)
    assert cache.cache_tensor.nbytes == (held.num_blocks + 2) * held.bytes_per_block
    if rounding:
        longest = max(LENGTHS) + STEPS - 1
        assert max(key.numel() for _, key in calls) == 2 * longest * 16
        assert all(key.dtype == torch.float32 for _, key in calls)


def test_other_models_keep_their_pages(caches: Any) -> None:
    model = built("Llama")
    served(model, prompts(), cache="int8")
    compare(model)
    served(built("Llama").bfloat16(), prompts(), cache="bfloat16")
    held = [next(iter(cache.cache_allocators.values())) for cache in caches]
    assert [each.cache_dtype for each in held] == [torch.int8, torch.float64, torch.bfloat16]
    assert [each.rounded_to for each in held] == [torch.int8, None, None]


def test_roundings_that_do_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    with refused(r"cache: expected one of .*int8.* or None, got 'int4'"):
        continuous_batching(built("Llama"), cache="int4").__enter__()  # type: ignore[arg-type]
    monkeypatch.delattr(pages, "ATTN_TYPE_TO_ALLOCATOR")
    with pytest.raises(ImportError, match=r"expected ATTN_TYPE_TO_ALLOCATOR for rounded pages"):
        continuous_batching(built("Llama"), cache="int8").__enter__()


def test_what_cannot_be_served_is_refused() -> None:
    model = built("Llama")
    with refused("cache: expected a call of continuous batching"), continuous_batching(model):
        model(torch.randint(3, 97, (1, 9)))
    assert model.config._attn_implementation == "eager"
    adaptive = use_ringtile(built("Llama"), attend=lambda *given, **named: sparse_attention(*given, **named))
    with refused("attend: expected None"), continuous_batching(adaptive):
        pass


def test_a_window_has_forgotten_what_a_pattern_keeps() -> None:
    model = use_ringtile(built("Mistral"), "window(9) | global_tokens(2)")
    assert all("expected one that moves along" in each.error for each in served(model, prompts()))


def test_kinds_of_layers_without_a_paged_cache() -> None:
    with refused("chunked_attention"):
        served(built("Llama 4"), prompts())
