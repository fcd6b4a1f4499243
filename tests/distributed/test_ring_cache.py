"""A cache whose keys stay at the ranks that hold them: what it computes, what it holds, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import make_inputs, relative_error
from processes import counted_traffic, on_ranks
from torch import Tensor

from ringtile.distributed import Layout, RingCache, ring_attend
from ringtile.functional.cache import LayerCache
from ringtile.modules import SparseLanguageModel, SparseTransformer
from ringtile.patterns import (
    Causal,
    Elements,
    GlobalTokens,
    Pattern,
    RandomBlocks,
    Strided,
    Window,
    per_head,
    streaming,
)

PROMPT = 300
LAYOUTS = {
    "contiguous": Layout.contiguous(PROMPT, 3),
    "zigzag": Layout.zigzag(PROMPT, 3, unit=16),
    "an empty rank": Layout(PROMPT, (((0, 40),), (), ((40, PROMPT),))),
}
PATTERNS: dict[str, Pattern] = {
    "causal": Causal(),
    "window": Causal() & Window(40),
    "streaming": streaming(sinks=4, window=16),
    "strided": Causal() & Strided(7),
    "random": Causal() & (Window(4) | RandomBlocks(1, block=16)),
    "per head": Causal() & per_head([Window(5) | GlobalTokens(2), Window(30), Causal(), Window(0)]),
    "rule": Causal() & Elements(lambda head, query, key: (query + key) % 3 == 0),
}
STEPS = [1, 1, 30, 1, 200, 1]


def steps_of(x: Tensor, dim: int = 2) -> list[Tensor]:
    return list(x.narrow(dim, PROMPT, sum(STEPS)).split(STEPS, dim))


def generated(
    rank: int, pattern: Pattern, layout: Layout, tensors: tuple[Tensor, ...], key_mask: Tensor | None = None
) -> tuple[list[Tensor], RingCache]:
    """The outputs of the prompt and of each step, at one rank."""
    cache = RingCache(pattern, layout=layout)
    masks = [None] * len(STEPS) if key_mask is None else steps_of(key_mask, 1)
    mine = None if key_mask is None else layout.shard(key_mask[:, :PROMPT], rank, dim=1)
    outs = [cache.attend(*(layout.shard(x[:, :, :PROMPT], rank) for x in tensors), key_mask=mine)]
    for mask, *parts in zip(masks, *map(steps_of, tensors), strict=True):
        outs.append(cache.attend(*parts, key_mask=mask))
    return outs, cache


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (name, kind)
        for row, kind in enumerate(PATTERNS)
        for column, name in enumerate(LAYOUTS)
        if (row + column) % 3 == 1
    ],
)
def test_ranks_compute_what_one_cache_computes(name: str, kind: str) -> None:
    """Every pattern in a layout, with a mask in one of them."""
    layout, pattern, masked = LAYOUTS[name], PATTERNS[kind], name == "contiguous"
    tensors = make_inputs(2, 4, PROMPT + sum(STEPS), kv_heads=2, value_dim=8)[:3]
    key_mask = torch.rand(2, PROMPT + sum(STEPS)) > 0.3 if masked else None
    if key_mask is not None:
        # The prompt of the second row is padding.
        key_mask[1, : PROMPT + 2] = False
        for x in tensors[1:]:
            x.masked_fill_(~key_mask[:, None, :, None], torch.nan)
    cache = LayerCache(pattern)
    parts = ([x[:, :, :PROMPT], *steps_of(x)] for x in tensors)
    masks = [None] * (1 + len(STEPS)) if key_mask is None else [key_mask[:, :PROMPT], *steps_of(key_mask, 1)]
    expected = [cache.attend(*part, key_mask=mask) for mask, *part in zip(masks, *parts, strict=True)]
    found = on_ranks(3, lambda rank: generated(rank, pattern, layout, tensors, key_mask))
    assert relative_error(layout.unshard([outs[0] for outs, _ in found]), expected[0]) < 1e-13
    for step, wanted in enumerate(expected[1:], 1):
        for outs, _ in found:
            # Every rank has the same bits: the next tokens must not differ.
            assert torch.equal(outs[step], found[0][0][step])
        assert relative_error(found[0][0][step], wanted) < 1e-13


def test_keys_lie_at_one_rank_each() -> None:
    tensors = make_inputs(1, 4, PROMPT + sum(STEPS))[:3]
    found = on_ranks(3, lambda rank: generated(rank, Causal(), LAYOUTS["contiguous"], tensors)[1])
    # Tokens 300 to 383 are of the third tile, and ranks take turns from there on.
    assert [cache.held for cache in found] == [128 + 128, 128 + 22, 44 + 84]
    assert {cache.length for cache in found} == {PROMPT + sum(STEPS)}


def test_a_window_lives_on_one_rank_and_is_bounded() -> None:
    layout = LAYOUTS["contiguous"]

    def after_many_steps(rank: int) -> tuple[int, int]:
        cache = RingCache(Causal() & Window(16), layout=layout)
        cache.attend(*torch.zeros(3, 1, 2, layout.size(rank), 8).unbind())
        for _ in range(200):
            cache.attend(*torch.zeros(3, 1, 2, 1, 8).unbind())
        return cache.held, cache.nbytes

    found = on_ranks(3, after_many_steps)
    token = 2 * 2 * 8 * 4 + 8 + 1
    assert 17 <= found[2][0] <= 2 * 17
    assert found[2][1] <= 2 * 17 * token
    assert [held for held, *_ in found[:2]] == [0, 0]


def test_a_step_moves_the_parts_and_no_keys() -> None:
    layout = LAYOUTS["contiguous"]
    with counted_traffic() as local:

        def step(rank: int) -> int:
            cache = RingCache(Causal(), layout=layout)
            cache.attend(*torch.zeros(3, 1, 2, layout.size(rank), 8).unbind())
            before = local.traffic.received
            cache.attend(*torch.zeros(3, 1, 2, 1, 8).unbind())
            return int(local.traffic.received - before)

        assert on_ranks(3, step) == [0, 0, 0]


@pytest.mark.parametrize(("name", "temperature"), [("contiguous", 1.0), ("zigzag", 0.0), ("an empty rank", 1.0)])
def test_a_model_generates_as_in_one_process(name: str, temperature: float) -> None:
    layout = LAYOUTS[name]

    def model(**options: Any) -> SparseLanguageModel:
        torch.manual_seed(1)
        rules = [Causal() & Window(20), Causal()]
        transformer = SparseTransformer(2, 32, 4, num_kv_heads=2, is_causal=True, pattern=rules, **options)
        made = SparseLanguageModel(50, transformer).double().eval()
        for weight in made.parameters():
            torch.nn.init.normal_(weight, std=0.3)
        return made

    prompt = torch.randint(50, (2, PROMPT))
    draws = {"temperature": temperature}
    expected = model().generate(prompt, 12, **draws, generator=torch.Generator().manual_seed(5))

    def on_a_rank(rank: int) -> Tensor:
        # Only the draws of one rank count: the others' generators differ.
        home = layout.runs[rank][-1:] and layout.runs[rank][-1][1] == PROMPT
        generator = torch.Generator().manual_seed(5 if home else rank)
        mine = layout.shard(prompt, rank, dim=1)
        return models[rank].generate(mine, 12, **draws, generator=generator)[:, mine.shape[1] :]

    models = [model(attend=ring_attend(None, layout)) for _ in range(3)]
    for found in on_ranks(3, on_a_rank):
        assert torch.equal(found, expected[:, PROMPT:])


def test_invalid_calls_are_refused() -> None:
    layout = Layout.contiguous(PROMPT, 1)

    def refusals(rank: int) -> None:
        with pytest.raises(ValueError, match="pattern: a cache needs one that keeps no later keys"):
            RingCache(Window(4), layout=layout)
        cache = RingCache(Causal(), layout=layout)
        x = torch.randn(1, 2, PROMPT, 8)
        with pytest.raises(ValueError, match="a cache has no gradients"):
            cache.attend(x.requires_grad_(), x, x)
        with pytest.raises(ValueError, match=f"query: expected the {PROMPT} tokens of rank 0"):
            cache.attend(*x.detach()[:, :, 1:].expand(3, -1, -1, -1, -1).unbind())
        cache.attend(*x.detach().expand(3, -1, -1, -1, -1).unbind())
        with pytest.raises(ValueError, match=r"query: expected .* at least one token"):
            cache.attend(*x.detach()[:, :, :0].expand(3, -1, -1, -1, -1).unbind())

    on_ranks(1, refusals)
