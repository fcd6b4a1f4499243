"""The defaults for dtype and device belong to the caller's program: under any of them, every result has the same bits.

Programs that load models set them. Buffers that follow them were once written by the library as float32.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import _lru_cache_wrapper
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ringtile import (
    ByQuery,
    Grid,
    Relative,
    SparseLanguageModel,
    SparseMultiheadAttention,
    SparseTransformer,
    build_index,
    dilated_attention,
    in_slices,
    longnet_attend,
    merge_attention,
    per_head,
    sparse_attention,
)
from ringtile.adaptive import (
    AdaptiveAttention,
    Antidiagonal,
    Blend,
    Box,
    Choice,
    Controller,
    Density,
    Gain,
    IndexedAttention,
    Means,
    Probe,
    Recent,
    Rounded,
    Shuffled,
    Sum,
    Threshold,
    TopK,
    TopP,
    View,
    audit,
    head_facts,
    index_loss,
    index_topk,
    share_keys,
)
from ringtile.adaptive.steps import Pages, attend_step
from ringtile.distributed import Layout, make_plan, ring_attend, ring_attention, ring_dilated_attention, roll
from ringtile.functional.score_mod import from_score_mod
from ringtile.index import clear_cache
from ringtile.kernels.masses import POOLS, pooled_masses
from ringtile.patterns import (
    BlockDilated,
    Blocks,
    Causal,
    Chosen,
    Dilated,
    Documents,
    Elements,
    GlobalTokens,
    Neighborhood,
    RandomBlocks,
    SampledBlocks,
    Segments,
    Strided,
    Window,
    from_mask,
)
from ringtile.tools.plot import occupancy
from ringtile.tools.predict.cost import estimate
from ringtile.tools.predict.hardware import HARDWARE, Sizes
from ringtile.tools.predict.work import survey

N, F32 = 300, torch.float32
_drawn = torch.Generator().manual_seed(0)


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=_drawn, dtype=F32)


Q, K, V = randn(1, 4, N, 16), randn(1, 2, N, 16), randn(1, 2, N, 16)
X = randn(1, N, 32)
SMALL = randn(1, 2, N, 8), randn(1, 1, N, 8)
MASK = (torch.arange(N) < 250)[None]
SEEN, GROUPS, ROWS = torch.arange(1, N + 1), torch.tensor([0, 100, N], dtype=torch.int32), torch.arange(0, N, 8)
LENGTHS, PROMPT = torch.tensor([200]), torch.arange(30)[None]
HIDDEN = torch.zeros(1, 1, N).masked_fill(~MASK, -torch.inf)
LISTS = torch.randint(0, N, (1, 1, N, 20), generator=_drawn)
TABLE, BY_QUERY, GRID, SINKS = randn(4, 33), randn(4, 33, 16), randn(4, 29, 39), randn(4)
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
LEFT = Causal() & Window(50)
INDEXED, LEARNS = IndexedAttention(4, 16, 40, num_kv_heads=2, dim=8).eval(), IndexedAttention(4, 16, 40, dim=8)
HEADS, LAYERS = SparseMultiheadAttention(32, 4, batch_first=True), SparseTransformer(2, 32, 4, is_causal=True)
WORDS = SparseLanguageModel(50, LAYERS)
LAYOUT = Layout.contiguous(N, 1)


def attend(pattern: Any, *, q: Tensor = Q, k: Tensor = K, v: Tensor = V, **options: Any) -> Any:
    """Output and gradients."""
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = sparse_attention(*leaves, pattern, enable_gqa=True, **options)
    return out, torch.autograd.grad(out.square().sum(), leaves)


def adaptive(scores: Any, budget: Any, *, mask: Tensor | None = None, rule: Any = None) -> Callable[[], Any]:
    return lambda: AdaptiveAttention(scores, budget, block=16)(
        Q, K, V, rule, is_causal=True, key_mask=mask, enable_gqa=True
    )


def grown(new_cache: Callable[[], Any]) -> Callable[[], Any]:
    """A prompt and a step."""

    def call() -> Any:
        cache = new_cache()
        return [cache.attend(*x) for x in ((Q, K, V), [x[:, :, :1] for x in (Q, K, V)])]

    return call


def masses(pool: str) -> Any:
    return pooled_masses(Q, K, segment=16, seen=SEEN, groups=GROUPS, pool=pool, bias=HIDDEN)


def learned() -> Any:
    out = LEARNS.train()(Q, Q, V.repeat(1, 2, 1, 1), is_causal=True)
    return out, LEARNS.loss, torch.autograd.grad(LEARNS.loss, [LEARNS.of_query, LEARNS.of_key])


def shared_keys() -> Any:
    share_keys([INDEXED], 40, lambda: INDEXED(Q, K, V, is_causal=True, enable_gqa=True))
    return torch.tensor(INDEXED.keys, dtype=torch.int64, device="cpu")


def report(choice: Any) -> Any:
    found = audit(Q, K, V, choice.index(choice.view(Q, K, Causal())), rows=20, reference=Causal())
    return repr(found)


FEATURES: dict[str, Callable[[], Any]] = {
    **{
        repr(rule): lambda rule=rule: attend(rule)  # type: ignore[misc]
        for rule in (
            *(LEFT, Dilated((3,), 9), BlockDilated((2,), 1, 32), Strided(30), GlobalTokens(4), RandomBlocks(1, 0, 32)),
            *(SampledBlocks(1, 3, 64, 256, 32), Segments(64, 2), Documents([100, 200]), Documents(ids=(MASK[0] * 1))),
            *(
                Blocks(torch.eye(5).bool(), block=64),
                Causal() & Chosen(LISTS),
                Elements(lambda h, i, j: i % 3 > j % 2),
            ),
            *(from_mask((LISTS[0, 0, :, :1] > torch.arange(N)) | torch.eye(N).bool()), Neighborhood((15, 20), 5)),
            per_head([Causal(), Window(9), Causal(), ~Window(2)]),
        )
    },
    "blockwise": lambda: attend(LEFT, backend="blockwise", key_mask=MASK),
    "reference": lambda: attend(LEFT, backend="reference"),
    "lists blockwise": lambda: attend(Causal() & Chosen(LISTS), backend="blockwise"),
    "relative": lambda: attend(Causal(), bias=Relative(TABLE, 16)),
    "by query": lambda: attend(Causal(), bias=ByQuery(Q, BY_QUERY, 16)),
    "grid": lambda: attend(None, bias=Grid(GRID, (15, 20))),
    "blockwise bias": lambda: attend(Causal(), bias=Relative(TABLE, 16), backend="blockwise"),
    "sinks": lambda: attend(Causal(), sinks=SINKS),
    "softcap, slopes": lambda: attend(Causal(), softcap=5.0, alibi_slopes=SLOPES),
    "key mask": lambda: attend(LEFT, key_mask=MASK),
    "key lengths": lambda: attend(LEFT, key_lengths=LENGTHS),
    "dropout": lambda: attend(LEFT, dropout_p=0.3, seed=3),
    "dropout blockwise": lambda: attend(LEFT, dropout_p=0.3, seed=3, backend="blockwise"),
    "bfloat16": lambda: attend(LEFT, q=Q.bfloat16(), k=K.bfloat16(), v=V.bfloat16()),
    "float64": lambda: attend(LEFT, q=Q.double(), k=K.double(), v=V.double()),
    "one query": lambda: attend(LEFT, q=Q[:, :, -1:]),
    "slices": lambda: in_slices(2)(Q, K, V, LEFT, enable_gqa=True),
    "merge": lambda: merge_attention(
        *zip(
            *[sparse_attention(Q, K, V, rule, enable_gqa=True, return_lse=True) for rule in (LEFT, Causal())],
            strict=True,
        )
    ),
    "index": lambda: attend(build_index(LEFT, N)),
    "score_mod": lambda: attend(
        Causal(),
        **from_score_mod(lambda s, b, h, i, j: s - (h + 1) * (i - j).abs(), 4, N, N, device="cpu"),
    ),
    "longnet": lambda: dilated_attention(Q, K, V, [64, 128], [1, 2], enable_gqa=True),
    "longnet union": lambda: dilated_attention(Q, K, V, [64, 128], [1, 2], enable_gqa=True, overlap="union"),
    "vmap": lambda: torch.vmap(lambda q: sparse_attention(q, K, V, LEFT, enable_gqa=True))(Q[None]),
    "second derivative": lambda: second_derivative(),
    **{f"masses {pool}": lambda pool=pool: masses(pool) for pool in POOLS},  # type: ignore[misc]
    "index_topk": lambda: index_topk(*SMALL, 20, pattern=Causal()),
    "index_topk of most": lambda: index_topk(*SMALL, 250, pattern=Causal()),
    "index_topk rounded": lambda: index_topk(*SMALL, 20, pattern=Causal(), rounded=True),
    "index_topk local": lambda: index_topk(*SMALL, 20, pattern=Causal(), local=4, key_mask=MASK),
    "index_loss": lambda: index_loss(*SMALL, Q, K, pattern=Causal()),
    "IndexedAttention": lambda: INDEXED(Q, K, V, is_causal=True, enable_gqa=True),
    "IndexedAttention that learns": learned,
    "share_keys": shared_keys,
    "Rounded": adaptive(Rounded(), Density(0.3)),
    "Rounded masked": adaptive(Rounded(), TopK(3), mask=MASK),
    "Probe": adaptive(Probe(), Threshold(0.07)),
    "Probe masked": adaptive(Probe("first"), Density(0.3), mask=MASK),
    "Blend": adaptive(Blend(), TopP(0.7), mask=MASK),
    "Blend per token": adaptive(Blend(None), Gain(0.1), mask=MASK, rule=Window(60)),
    "Box": adaptive(Box(), Density((0.2, 0.3, 0.4, 0.5))),
    "Means": adaptive(Means(), Density(0.3)),
    "Antidiagonal": adaptive(Antidiagonal(8), Density(0.3)),
    "Antidiagonal masked": adaptive(Antidiagonal(8), Density(0.3), mask=MASK),
    "Recent, Shuffled": adaptive(Sum(Recent(), Shuffled(0)), Density(0.3)),
    "Controller": lambda: adaptive(Rounded(), Controller(0.8, rows=16))(),
    "audit": lambda: report(Choice(Probe(), Density(0.3), block=16)),
    "head_facts": lambda: tuple(head_facts(View(Q, K, build_index(Causal(), N, block=16)), V, Probe(), ROWS)),
    "module": lambda: HEADS(X, X, X, need_weights=False, is_causal=True)[0],
    "module's weights": lambda: HEADS(X, X, X, need_weights=True, average_attn_weights=False)[1],
    "transformer": lambda: LAYERS(X),
    "longnet_attend": lambda: longnet_attend([64, 128], [1, 2])(Q, K, V, is_causal=True, enable_gqa=True),
    "generation": lambda: WORDS.eval().generate(PROMPT, 4),
    "cache": grown(lambda: INDEXED.new_cache(Causal())),
    "adaptive cache": grown(lambda: AdaptiveAttention(Probe("first"), Density(0.3), block=16).new_cache(Causal())),
    "cache of tokens": grown(lambda: AdaptiveAttention(Blend(None), Density(0.3), block=16).new_cache(Causal())),
    "step": lambda: attend_step(
        choice := Choice(Blend(None), Density(0.3), block=16), Pages(choice), Q[:, :, -1:], K, V, key_mask=MASK
    ),
    "ring": lambda: ring_attention(Q, K, V, LEFT, layout=LAYOUT, enable_gqa=True),
    "ring's lists": lambda: ring_attention(Q, K, V, Causal() & Chosen(LISTS), layout=LAYOUT, enable_gqa=True),
    "ring's longnet": lambda: ring_dilated_attention(Q, K, V, [64, 128], [1, 2], layout=LAYOUT, enable_gqa=True),
    "ring's cache": grown(lambda: ring_attend(None, LAYOUT).new_cache(LEFT)),
    "roll": lambda: roll(X, -1, LAYOUT),
    "plan of ranks": lambda: make_plan(LEFT, Layout.contiguous(2048, 4), 1).fingerprint,
    "prediction": lambda: [
        estimate(survey(LEFT, Layout.contiguous(4096, 8), Sizes()), transport, HARDWARE["h100"])
        for transport in ("exchange", "gather", "hierarchy", "ulysses")
    ],
    "picture": lambda: (LEFT.draw(N), occupancy(build_index(LEFT, N), pixels=16)[0], LEFT.density(N)),
}


def second_derivative() -> Any:
    q = Q.detach().clone().requires_grad_()
    out = sparse_attention(q, K, V, LEFT, enable_gqa=True, backend="blockwise")
    (grad,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    return torch.autograd.grad(grad.square().sum(), q)


@pytest.fixture(scope="module", autouse=True)
def _one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@contextmanager
def default(dtype: torch.dtype | None = None, device: str | None = None) -> Iterator[None]:
    """Other defaults, with empty caches: what is kept was made under the usual ones."""
    clear_cache()
    for name, module in list(sys.modules.items()):
        if name.startswith(("ringtile.patterns.", "ringtile.distributed.")):
            for value in list(vars(module).values()):
                if isinstance(value, _lru_cache_wrapper):
                    value.cache_clear()
    try:
        torch.set_default_dtype(dtype or F32)
        with nullcontext() if device is None else torch.device(device):
            yield
    finally:
        torch.set_default_dtype(F32)


def assert_equal(got: Any, wanted: Any) -> None:
    """The same numbers, bit for bit, of the same dtype and device."""
    if isinstance(wanted, Tensor):
        assert (got.dtype, got.device) == (wanted.dtype, wanted.device)
        assert torch.equal(got.nan_to_num(9), wanted.nan_to_num(9))
    elif isinstance(wanted, (list, tuple)):
        for one, other in zip(got, wanted, strict=True):
            assert_equal(one, other)
    else:
        assert got == wanted


@pytest.mark.parametrize("name", FEATURES)
def test_no_result_depends_on_the_defaults(name: str) -> None:
    call = FEATURES[name]
    torch.manual_seed(0)
    with default():
        wanted = call()
    for dtype, device in ((torch.float64, None), (torch.bfloat16, None), (None, "meta")):
        torch.manual_seed(0)
        with default(dtype, device):
            got = call()
        assert_equal(got, wanted)
