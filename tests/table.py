"""One table of calls: every rule with every option, shape, dtype, gradient, form and backend.

Each axis is a dict. A case takes one value of each. What it is to give comes from `ringtile.testing.oracle`, or it is a
refusal that `REFUSALS` names. Keys and values that no query reads are NaN.
"""

from __future__ import annotations

import copy
import logging
import math
import pickle
import random
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, pairwise, product
from typing import Any, NamedTuple

import pytest
import torch
from native_sets import INSTRUCTION_SETS, set_number, use_set
from processes import on_ranks
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from ringtile import ByKey, ByQuery, Grid, Relative, build_index, merge_attention, sparse_attention
from ringtile.adaptive import AdaptiveAttention, Density
from ringtile.distributed import Layout, ring_attention
from ringtile.functional import dilated_attention, in_slices
from ringtile.functional.cache import LayerCache
from ringtile.index import clear_cache
from ringtile.integrations.transformers.attention import attend as attend_layer, read_pattern
from ringtile.integrations.transformers.masks import pattern_mask
from ringtile.kernels.blockwise import chunks
from ringtile.modules import SparseMultiheadAttention
from ringtile.patterns import (
    BlockDilated,
    Blocks,
    Causal,
    Chosen,
    Dense,
    Dilated,
    Documents,
    Elements,
    GlobalTokens,
    Neighborhood,
    Pattern,
    RandomBlocks,
    SampledBlocks,
    Segments,
    Strided,
    Window,
    from_mask,
    parse,
    per_document,
    per_head,
)
from ringtile.testing.cases import SHAPES, Shape
from ringtile.testing.oracle import Rule, attention, kept_pairs

logging.getLogger("torch.testing._internal.common_distributed").disabled = True

Results = dict[str, Tensor]
Output = tuple[Tensor, Tensor | None]
"""The output and the lse of a form, or None where it returns none."""


def _tensor(g: torch.Generator, *size: int) -> Tensor:
    return torch.randn(*size, generator=g, dtype=torch.float64)


def _marks(g: torch.Generator, *size: int, density: float = 0.5) -> Tensor:
    return torch.rand(*size, generator=g, dtype=torch.float64) < density


def _lists(s: Shape, g: torch.Generator, groups: int, batch: int, count: int, block: int = 1) -> Tensor:
    return torch.randint(-1, -(-s.keys // block), (batch, groups, s.queries, count), generator=g)


def _grid(s: Shape) -> tuple[int, int]:
    """The two factors of a number of keys that are nearest to each other."""
    low = next((n for n in range(math.isqrt(max(s.keys, 1)), 0, -1) if s.keys % n == 0), 1)
    return low, s.keys // low


def _mask(s: Shape, g: torch.Generator, heads: int, batch: int) -> tuple[Pattern, Rule]:
    mask = _marks(g, batch, heads, s.queries, s.keys)
    return from_mask(mask), mask


def _ids(s: Shape) -> Tensor:
    return torch.arange(s.keys) // (7 + 3 * torch.arange(s.batch).unsqueeze(1))


RULES: dict[str, Callable[[Shape, torch.Generator], Any]] = {
    "all": lambda s, g: Dense(),
    "causal": lambda s, g: Causal(),
    "window": lambda s, g: Window(9, 3),
    "causal window": lambda s, g: Causal() & Window(20),
    "strided": lambda s, g: Causal() & Strided(7),
    "global tokens": lambda s, g: Causal() & (Window(5) | GlobalTokens(3)),
    "global list": lambda s, g: Window(4) | GlobalTokens([2, 17]),
    "segments": lambda s, g: Segments(16, 3, 1),
    "dilated": lambda s, g: Dilated([1, 3], 4),
    "block dilated": lambda s, g: BlockDilated([1, 2], 1, block=8),
    "random blocks": lambda s, g: RandomBlocks(2, 7, block=8),
    "sampled blocks": lambda s, g: SampledBlocks(1, 3, 16, 32, block=8),
    "complement": lambda s, g: ~Window(4),
    "blocks": lambda s, g: Blocks(_marks(g, s.heads, -(-(s.first + s.queries) // 16), -(-s.keys // 16)), block=16),
    "elements": lambda s, g: Elements(lambda h, q, k: (q + k + h) % 3 == 0),
    "mask_mod": lambda s, g: Elements.from_mask_mod(lambda b, h, q, k: (q * k + h + b) % 5 < 2, batch=s.batch),
    "mask": lambda s, g: _mask(s, g, 1, 1),
    "mask per batch": lambda s, g: _mask(s, g, s.heads, s.batch),
    "documents": lambda s, g: Causal() & Documents(s.documents),
    "documents per batch": lambda s, g: Causal() & Documents(ids=_ids(s)),
    "per document": lambda s, g: per_document(Window(3) | GlobalTokens(1), Documents(s.documents)),
    "per head": lambda s, g: per_head([Causal(), Window(5), Dense(), ~Window(3)][: s.heads]),
    "neighborhood": lambda s, g: Neighborhood([s.keys], min(5, s.keys)),
    "neighborhood of a grid": lambda s, g: Neighborhood(_grid(s), [min(3, n) for n in _grid(s)]),
    "chosen": lambda s, g: Chosen(_lists(s, g, s.key_heads, s.batch, 12)),
    "causal chosen": lambda s, g: Causal() & Chosen(_lists(s, g, 1, 1, 12)),
    "window or chosen": lambda s, g: Causal() & (Window(7) | Chosen(_lists(s, g, s.key_heads, s.batch, 9))),
    "chosen blocks": lambda s, g: Chosen(_lists(s, g, 1, 1, 5, 4), 4),
}

OPTIONS: dict[str, Callable[[Shape, torch.Generator], dict[str, Any]]] = {
    "none": lambda s, g: {},
    "is_causal": lambda s, g: {"is_causal": True},
    "key_mask": lambda s, g: {"key_mask": _marks(g, s.batch, s.keys, density=0.7)},
    "key_lengths": lambda s, g: {"key_lengths": torch.randint(0, s.keys + 1, (s.batch,), generator=g)},
    "key_mask, key_lengths": lambda s, g: OPTIONS["key_mask"](s, g) | OPTIONS["key_lengths"](s, g),
    "dropout": lambda s, g: {"dropout_p": 0.3, "seed": 2**40 + 5},
    "dropout of a part": lambda s, g: {
        "dropout_p": 0.5,
        "seed": 3,
        "head_at": torch.arange(s.heads) * 3 + 1,
        "batch_at": torch.arange(s.batch) + 4,
    },
    "scale": lambda s, g: {"scale": -0.3},
    "softcap": lambda s, g: {"softcap": 2.0},
    "alibi": lambda s, g: {"alibi_slopes": torch.rand(s.heads, generator=g, dtype=torch.float64)},
    "sinks": lambda s, g: {"sinks": _tensor(g, s.heads)},
    "sinks, softcap, key_lengths": lambda s, g: (
        OPTIONS["sinks"](s, g) | {"softcap": 3.0} | OPTIONS["key_lengths"](s, g)
    ),
    "relative": lambda s, g: {"bias": Relative(_tensor(g, s.heads, 31), 15)},
    "grid": lambda s, g: {"bias": Grid(_tensor(g, 1, *(max(2 * n - 1, 0) for n in _grid(s))), _grid(s))},
    "by query, by key": lambda s, g: {
        "bias": (
            ByQuery(_tensor(g, s.batch, s.heads, s.queries, 4), _tensor(g, s.heads, 31, 4), 15),
            ByKey(_tensor(g, s.batch, s.key_heads, s.keys, 4), _tensor(g, 1, 31, 4), 3),
        )
    },
    "relative, sinks, key_mask": lambda s, g: (
        OPTIONS["relative"](s, g) | OPTIONS["sinks"](s, g) | OPTIONS["key_mask"](s, g)
    ),
}

DTYPES = {
    "float64": (torch.float64, torch.float32),
    "float32": (torch.float32, torch.float32),
    "bfloat16": (torch.bfloat16, torch.float32),
    "float16": (torch.float16, torch.float32),
    "float32, default float64": (torch.float32, torch.float64),
    "float64, default bfloat16": (torch.float64, torch.bfloat16),
}
"""The dtype of a call, and the default dtype."""

ERRORS = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""Relative error of a tensor, in the L2 norm, that a dtype may have."""

GRADIENTS = {
    "none": "",
    "all": "query key value",
    "query": "query",
    "key": "key",
    "value": "value",
    "query, value": "query value",
    "all, lse": "query key value lse",
    "sinks": "query key value sinks",
    "bias": "query key value bias",
}

BACKENDS: dict[str, str | None] = {
    "default": None,
    **{name: name for name in ("native", "blockwise", "dense", "reference")},
    **{f"native {name}": "native" for name in INSTRUCTION_SETS},
    "blockwise in parts": "blockwise",
    "triton": "triton",
}
"""The backend, and the instruction set behind its name. Triton runs in processes that interpret it."""

IN_PARTS = dict.fromkeys(("CHUNK_BYTES", "_MASK_BYTES", "_OUT_BYTES"), 20_000) | {
    "_SHORT_LIST": 1,
    "_HEADS": 1,
    "_FEW_TILES": 0,
}
"""Sizes by which `blockwise` cuts calls of the table, as it cuts large ones."""


@dataclass(frozen=True)
class Case:
    """One value of each axis, and the seed of its numbers."""

    rule: str = "causal window"
    option: str = "none"
    shape: str = "square"
    dtype: str = "float64"
    gradients: str = "all"
    form: str = "plain"
    backend: str = "default"
    seed: int = 0

    def __str__(self) -> str:
        return " | ".join(f"{name}={value}" for name, value in vars(self).items())


class Call(NamedTuple):
    """The arguments of a case."""

    case: Case
    shape: Shape
    query: Tensor
    key: Tensor
    value: Tensor
    pattern: Pattern
    rule: Rule
    options: dict[str, Any]

    @property
    def shared(self) -> dict[str, Any]:
        """The options of the call, with its start, its heads and its backend."""
        s = self.shape
        of_shape = {} if s.start is None else {"start": s.start}
        of_shape |= {"enable_gqa": s.heads != s.key_heads, "backend": BACKENDS[self.case.backend]}
        return of_shape | self.options

    @property
    def arguments(self) -> dict[str, Any]:
        """What `sparse_attention` gets beside query, key and value."""
        return {"pattern": self.pattern, "return_lse": True} | self.shared

    @property
    def key_mask(self) -> Tensor:
        """The mask and the lengths of the keys in one mask."""
        s, options = self.shape, self.options
        kept = options.get("key_mask", torch.ones(s.batch, s.keys, dtype=torch.bool))
        if (lengths := options.get("key_lengths")) is not None:
            kept = kept & (torch.arange(s.keys) < lengths.unsqueeze(1))
        return kept

    def masked(self, key_mask: Tensor) -> Call:
        """The call with a mask in place of its mask and lengths."""
        return self._replace(
            options={n: x for n, x in self.options.items() if n != "key_lengths"} | {"key_mask": key_mask}
        )

    def part(self, first: int, end: int) -> Call:
        """The call of the queries from ``first`` to ``end``."""
        shape = replace(self.shape, queries=end - first, start=self.shape.first + first)
        pattern = _map_lists(self.pattern, lambda x: x[:, :, first:end])
        options = dict(self.options)
        if isinstance(bias := options.get("bias"), tuple):
            options["bias"] = (replace(bias[0], query=bias[0].query[:, :, first:end]), *bias[1:])
        return self._replace(shape=shape, query=self.query[:, :, first:end], pattern=pattern, options=options)


def _map_lists(pattern: Pattern, function: Callable[[Tensor], Tensor]) -> Pattern:
    if isinstance(pattern, Chosen):
        return Chosen(function(pattern.indices), pattern.block)
    parts = getattr(pattern, "parts", ())
    if not parts or not any(isinstance(part, Chosen) or getattr(part, "parts", ()) for part in parts):
        return pattern
    return pattern.rebuilt([_map_lists(part, function) for part in parts])  # type: ignore[attr-defined]


def made(case: Case) -> Call:
    """Make the arguments of a case: the same ones every time."""
    shape = SHAPES[case.shape]
    g = torch.Generator().manual_seed(zlib.crc32(str(case).encode()) + case.seed)
    dtype = DTYPES[case.dtype][0]
    query = _tensor(g, shape.batch, shape.heads, shape.queries, shape.head_dim)
    key = _tensor(g, shape.batch, shape.key_heads, shape.keys, shape.head_dim)
    value = _tensor(g, shape.batch, shape.key_heads, shape.keys, shape.value_dim)
    pattern = RULES[case.rule](shape, g)
    pattern, rule = pattern if isinstance(pattern, tuple) else (pattern, pattern)
    options = OPTIONS[case.option](shape, g)
    if case.form == "transformers" and "key_mask" in options:
        # There, a pattern counts from the first token that is real.
        options["key_mask"][:, :1] = True
    call = Call(case, shape, *(x.to(dtype) for x in (query, key, value)), pattern, rule, options)
    call = call._replace(options=_cast(options, dtype))
    # There, queries of the padding read them.
    if case.form != "left padded" and shape.memory != "expanded" and (read := read_keys(call)) is not None:
        unread = ~read
        call = call._replace(key=_poisoned(call.key, unread), value=_poisoned(call.value, unread))
    query, key, value = shape.laid_out(call.query, call.key, call.value)
    return call._replace(query=query, key=key, value=value)


def _cast(options: Any, dtype: torch.dtype) -> Any:
    def cast(x: Any) -> Any:
        if isinstance(x, Tensor) and x.is_floating_point():
            return x.to(dtype)
        if isinstance(x, tuple) and not hasattr(x, "_fields") and x and hasattr(x[0], "table"):
            return tuple(map(cast, x))
        if hasattr(x, "table"):
            return type(x)(**{name: cast(part) for name, part in vars(x).items()})
        return x

    return {name: cast(x) for name, x in options.items()}


def read_keys(call: Call) -> Tensor | None:
    """The keys that a query of a call reads, bool ``[B, Hkv, Nk]``, or None for a call that is refused."""
    s, options = call.shape, call.options
    if refusal(call.case):
        return None
    masks = {name: options[name] for name in ("is_causal", "key_mask", "key_lengths") if name in options}
    sizes = s.batch, s.heads, s.queries, s.keys
    pairs = torch.stack([kept_pairs(rule, *sizes, start=s.first, **masks) for rule in _rules(call)]).any(0)
    if call.case.form == "multihead":
        # Its matrices would mix the NaN of a head into the others.
        pairs = pairs.any(1, keepdim=True).expand(sizes)
    return pairs.any(2).view(s.batch, s.key_heads, s.heads // s.key_heads, s.keys).any(2)


def _poisoned(x: Tensor, where: Tensor) -> Tensor:
    return x.masked_fill(where.unsqueeze(3), math.nan)


def plain(call: Call, **more: Any) -> tuple[Tensor, Tensor]:
    """Call `sparse_attention`, or ``by`` a function like it."""
    compute = more.pop("by", sparse_attention)
    result: tuple[Tensor, Tensor] = compute(call.query, call.key, call.value, **call.arguments | more)
    return result


def by_index(call: Call) -> Output:
    s = call.shape
    batch = s.batch if call.pattern.batch_size is not None else 1
    index = build_index(call.pattern, s.queries, s.keys, start=s.start, num_heads=s.heads, batch=batch, block=16)
    return plain(call, pattern=index, start=None)


def by_text(call: Call) -> Output:
    return plain(call, pattern=call.pattern if call.pattern.text is None else parse(call.pattern.text))


def copied(call: Call) -> Output:
    pattern = copy.deepcopy(call.pattern)
    return plain(call, pattern=pattern if "Elements" in repr(pattern) else pickle.loads(pickle.dumps(pattern)))


def checkpointed(call: Call) -> Output:
    def compute(q: Tensor, k: Tensor, v: Tensor) -> Output:
        return plain(call._replace(query=q, key=k, value=v))

    out, lse = checkpoint(compute, call.query, call.key, call.value, use_reentrant=False)
    return out, lse


def in_chunks(call: Call) -> Output:
    """A prompt in pieces of 13 queries."""
    cuts = [*range(0, call.shape.queries, 13), call.shape.queries]
    parts = [plain(call.part(a, b)) for a, b in pairwise(cuts)] or [plain(call)]
    return torch.cat([out for out, _ in parts], 2), torch.cat([lse for _, lse in parts], 2)


def vmapped(call: Call) -> Output:
    """Two calls that share everything but their tensors."""
    tensors = [torch.stack([x, x.flip(0) if x.shape[0] == 1 else x]) for x in (call.query, call.key, call.value)]
    out, lse = torch.vmap(lambda q, k, v: plain(call._replace(query=q, key=k, value=v)))(*tensors)
    return out[0], lse[0]


def compiled(call: Call) -> Output:
    torch.compiler.reset()
    # One graph for all lengths in half of the cases.
    dynamic = bool(zlib.crc32(str(call.case).encode()) % 2)
    # Dynamo of torch 2.11 fails to look into tuples with names.
    options = call.arguments
    compute = torch.compile(lambda q, k, v: sparse_attention(q, k, v, **options), backend="aot_eager", dynamic=dynamic)
    out, lse = compute(call.query, call.key, call.value)
    return out, lse


def adaptive(call: Call) -> Output:
    """All tiles of the rule: a density of 1."""
    choose = AdaptiveAttention(budget=Density(1.0), block=16, allow_future=True)
    return plain(call, by=choose)


def autocast(call: Call) -> Output:
    """Tensors of the call's dtype in a context of the same."""
    dtype = call.query.dtype
    with torch.autocast("cpu", dtype if dtype.itemsize == 2 else torch.bfloat16, enabled=dtype.itemsize != 4):
        return plain(call)


def right_padded(call: Call) -> Output:
    """More keys, which are no token, after those of the call."""
    return _padded(call, [0] * call.shape.batch, 5, 0, call.pattern)


def left_padded(call: Call) -> Output:
    """Batch elements that begin after 0, 1, ... tokens of padding, and count from there."""
    s, n = call.shape, 3
    leads = [number % (n + 1) for number in range(s.batch)]
    position, lead = torch.arange(s.keys + n), torch.tensor(leads).unsqueeze(1)
    ids = (position >= lead).long() + (position >= lead + s.keys)
    return _padded(call, leads, n, n, per_document(call.pattern, Documents(ids=ids)))


def _padded(call: Call, leads: list[int], n: int, of_queries: int, pattern: Pattern) -> Output:
    """Rows with ``n`` keys and some queries more than those of the call, which begin after their padding."""
    s, options = call.shape, dict(call.options)

    def longer(x: Tensor, fill: float = math.nan, n: int = n, dims: int = 2) -> Tensor:
        rows = [pad(row, [0] * (2 * dims - 2) + [a, n - a], value=fill) for row, a in zip(x, leads, strict=True)]
        return torch.stack(rows) if rows else x

    if isinstance(bias := options.get("bias"), tuple):
        query = longer(bias[0].query, 0, of_queries)
        options["bias"] = replace(bias[0], query=query), replace(bias[1], key=longer(bias[1].key))
    shape, mask = replace(s, keys=s.keys + n, start=s.first), longer(call.key_mask, False, dims=1)
    call = call._replace(shape=shape, query=longer(call.query, 0, of_queries), pattern=pattern, options=options)
    results = plain(call._replace(key=longer(call.key), value=longer(call.value)).masked(mask))
    if not of_queries:
        return results
    out, lse = (torch.stack([row[:, a : a + s.queries] for row, a in zip(x, leads, strict=True)]) for x in results)
    return out, lse


def packed(call: Call) -> Output:
    """All batch elements as documents of one row."""
    s, options = call.shape, dict(call.options)

    def in_a_row(x: Tensor) -> Tensor:
        return x.transpose(0, 1).flatten(1, 2).unsqueeze(0)

    if isinstance(bias := options.get("bias"), tuple):
        query, key = in_a_row(bias[0].query), in_a_row(bias[1].key)
        options["bias"] = replace(bias[0], query=query), replace(bias[1], key=key)
    pattern = per_document(call.pattern, Documents([s.keys] * s.batch))
    row = call._replace(query=in_a_row(call.query), key=in_a_row(call.key), value=in_a_row(call.value))
    out, lse = plain(row._replace(options=options).masked(call.key_mask.view(1, -1)), pattern=pattern)
    return tuple(x[0].unflatten(1, (s.batch, -1)).transpose(0, 1) for x in (out, lse))  # type: ignore[return-value]


def merged(call: Call) -> Output:
    """Two calls, over the keys of even and of odd positions."""
    even, mask = torch.arange(call.shape.keys) % 2 == 0, call.key_mask
    outs, lses = zip(*(plain(call.masked(mask & part)) for part in (even, ~even)), strict=True)
    return merge_attention(outs, lses)


def cached(call: Call) -> Output:
    """A prompt of half of the tokens, and then one token at a time."""
    n, rule = call.shape.keys, Causal() & call.pattern if call.options.get("is_causal") else call.pattern
    cache, outs = LayerCache(rule), []
    for a, b in pairwise(sorted({0, *range(n // 2, n + 1)})):
        tensors = [x[:, :, a:b] for x in (call.query, call.key, call.value)]
        outs += [
            cache.attend(*tensors, key_mask=call.options["key_mask"][:, a:b] if "key_mask" in call.options else None)
        ] * (a < b)
    return torch.cat(outs, 2), None


def multihead(call: Call) -> Output:
    """The module in place of PyTorch's, whose matrices hand queries, keys and values on as they are."""
    s, options = call.shape, call.shared
    width, of_keys, causal = s.heads * s.head_dim, s.key_heads * s.head_dim, options.pop("is_causal", False)
    mask, dropout = options.pop("key_mask", None), options.pop("dropout_p", 0.0)
    module = SparseMultiheadAttention(
        width,
        s.heads,
        dropout,
        bias=False,
        batch_first=True,
        **dict(kdim=of_keys, vdim=of_keys, dtype=call.query.dtype, pattern=call.pattern),
        attend=partial(sparse_attention, **options | {"enable_gqa": False}),
    )
    repeat = (
        torch.eye(of_keys).unflatten(0, (s.key_heads, -1)).repeat_interleave(s.heads // s.key_heads, 0).flatten(0, 1)
    )
    weights = {"q_proj_weight": torch.eye(width), "k_proj_weight": repeat, "v_proj_weight": repeat}
    if of_keys == width:
        weights = {"in_proj_weight": torch.cat(list(weights.values()))}
    module.load_state_dict(weights | {"out_proj.weight": torch.eye(width)})
    module.requires_grad_(False)
    tensors = [x.transpose(1, 2).flatten(2) for x in (call.query, call.key, call.value)]
    padding = None if mask is None else ~mask
    out, _ = module(*tensors, padding, need_weights=False, is_causal=causal)
    return out.unflatten(2, (s.heads, s.value_dim)).transpose(1, 2), None


def of_transformers(call: Call) -> Output:
    """The function that transformers calls, with the mask that its interface makes."""
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    s, options = call.shape, dict(call.options)
    function = causal_mask_function if options.pop("is_causal", False) else bidirectional_mask_function
    padding = call.key_mask if {"key_mask", "key_lengths"} & options.keys() else None
    sizes = {"batch_size": s.batch, "q_length": s.queries, "kv_length": s.keys, "q_offset": s.first}
    mask = pattern_mask(**sizes, mask_function=function, attention_mask=padding)
    scores = {name: x for name in ("bias", "alibi_slopes") if (x := options.get(name)) is not None}
    given = {"scaling": options.get("scale"), "softcap": options.get("softcap"), "s_aux": options.get("sinks")}
    tensors = call.query, call.key, call.value
    out, _ = attend_layer(
        read_pattern(call.pattern), nn.Module(), *tensors, mask, position_bias=lambda *at: scores, **given
    )
    return out.transpose(1, 2), None


BRANCHES = [12, 24], [1, 2]
"""Segment lengths and dilations of LongNet."""


def _dilated(call: Call, overlap: str) -> Output:
    by = partial(dilated_attention, segment_lengths=BRANCHES[0], dilation_rates=BRANCHES[1], overlap=overlap)
    return plain(call, by=by)


def _rules(call: Call) -> list[Rule]:
    """The rules of a form, whose pairs count once per rule: those of the branches of LongNet, or one."""
    if not call.case.form.startswith("LongNet"):
        return [call.rule]
    s, rules = call.shape, []
    i, j = torch.arange(s.first, s.first + s.queries).unsqueeze(1), torch.arange(s.keys)
    for length, rate in zip(*BRANCHES, strict=True):
        inner = kept_pairs(call.rule, s.batch, s.heads, length // rate, length // rate, start=0)
        phase = torch.arange(s.heads).view(-1, 1, 1) % rate
        inside = (i // length == j // length) & (i % length % rate == phase) & (j % length % rate == phase)
        rules.append(inside & inner[:, :, i % length // rate, j % length // rate])
    return rules if call.case.form == "LongNet" else [rules[0] | rules[1]]


class _OnRanks(torch.autograd.Function):
    """Tensors of a call, with the numbers of its ranks as one function."""

    @staticmethod
    def forward(ctx: Any, compute: Callable[..., Any], *tensors: Tensor) -> Any:
        ctx.compute = compute
        ctx.save_for_backward(*tensors)
        return compute(None, *tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, *ctx.compute(grads, *ctx.saved_tensors)


def _on_ranks(call: Call, n_ranks: int, transport: str) -> Output:
    """The tokens of the call on ranks, zigzag in units of 3."""
    n, sinks = call.shape.keys, [call.options["sinks"]] if "sinks" in call.options else []
    layout, options = Layout.zigzag(n, n_ranks, unit=3), call.shared

    def compute(grads: Any, *tensors: Tensor) -> list[Tensor]:
        errors = []

        def run(rank: int) -> list[Tensor]:
            own = dict(options)
            if "key_mask" in own:
                own["key_mask"] = layout.shard(own["key_mask"], rank, 1)
            leaves = [x.detach().requires_grad_() for x in tensors]
            if sinks:
                own["sinks"] = leaves[3]
            pattern = _map_lists(call.pattern, lambda x: layout.shard(x, rank))
            more = {"layout": layout, "transport": transport, "return_lse": True}
            try:
                results = ring_attention(*(layout.shard(x, rank) for x in leaves[:3]), pattern, **more, **own)
                if grads is None:
                    return [x.detach() for x in results]
                parts = [layout.shard(x, rank) for x in grads]
                return list(torch.autograd.grad(results, leaves, parts, allow_unused=True, materialize_grads=True))
            except Exception as error:
                errors.append(error)
                raise

        try:
            found = on_ranks(n_ranks, run)
        except Exception:
            raise errors[0] from None
        if grads is None:
            return tuple(layout.unshard(x) for x in zip(*found, strict=True))
        return [sum(x) for x in zip(*found, strict=True)]

    out, lse = _OnRanks.apply(compute, call.query, call.key, call.value, *sinks)
    return out, lse


FORMS: dict[str, Callable[[Call], Output]] = {
    "plain": plain,
    "index": by_index,
    "text": by_text,
    "copy": copied,
    "checkpoint": checkpointed,
    "batched gradients": plain,
    "chunks": in_chunks,
    "slices": lambda call: plain(call, by=in_slices(3)),
    "merged": merged,
    "vmap": vmapped,
    "compiled": compiled,
    "adaptive": adaptive,
    "autocast": autocast,
    "right padded": right_padded,
    "left padded": left_padded,
    "packed": packed,
    "cache": cached,
    "multihead": multihead,
    "transformers": of_transformers,
    "LongNet": lambda call: _dilated(call, "mix"),
    "LongNet, union": lambda call: _dilated(call, "union"),
    "one rank": lambda call: _on_ranks(call, 1, "auto"),
    "two ranks": lambda call: _on_ranks(call, 2, "auto"),
    "two ranks by heads": lambda call: _on_ranks(call, 2, "ulysses"),
}

AXES: dict[str, dict[str, Any]] = {
    "rule": RULES,
    "option": OPTIONS,
    "shape": SHAPES,
    "dtype": DTYPES,
    "gradients": GRADIENTS,
    "form": FORMS,
    "backend": {name: backend for name, backend in BACKENDS.items() if backend != "triton"},
}


def expected(call: Call, has_lse: bool) -> Results:
    """The results of the oracle."""
    leaves, options = _leaves(call)
    tensors = leaves["query"], leaves["key"], leaves["value"]
    parts = [attention(*tensors, rule, start=call.shape.start, **options) for rule in _rules(call)]
    out, lse = parts[0]
    if len(parts) > 1:
        outs, lses = (torch.stack(x) for x in zip(*parts, strict=True))
        empty = (lses == -math.inf).all(0)
        total = torch.where(empty, 0, lses).logsumexp(0)
        # The share of each rule in the denominator of a softmax over the pairs of all.
        out = ((lses - total).exp().unsqueeze(-1) * outs).sum(0)
        lse = torch.where(empty, -math.inf, total)
    return _results(call, leaves, out, lse if has_lse else None)


def actual(call: Call) -> Results:
    """The results of a form of the call."""
    leaves, options = _leaves(call)
    call = call._replace(query=leaves["query"], key=leaves["key"], value=leaves["value"], options=options)
    with pytest.MonkeyPatch.context() as patch:
        if "native " in call.case.backend:
            use_set(call.case.backend.removeprefix("native "), patch)
        elif call.case.backend == "blockwise in parts":
            clear_cache()
            for name, size in IN_PARTS.items():
                patch.setattr(chunks, name, size)
        # Where autograd runs in the calls, and where a cache has none.
        with torch.set_grad_enabled(bool(GRADIENTS[call.case.gradients])):
            out, lse = FORMS[call.case.form](call)
            return _results(call, leaves, out, lse, is_batched=call.case.form == "batched gradients")


def _leaves(call: Call) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a call, those that get a gradient among them, and its options with the same tensors."""
    names = GRADIENTS[call.case.gradients].split()
    leaves = {"query": call.query, "key": call.key, "value": call.value}
    options = dict(call.options)
    if "sinks" in options:
        leaves["sinks"] = options["sinks"]
    biases = options.get("bias", ())
    several = biases if isinstance(biases, tuple) else (biases,)
    for number, bias in enumerate(several):
        leaves |= {f"bias {number} {n}": x for n, x in vars(bias).items() if isinstance(x, Tensor)}
    leaves = {name: x.detach().requires_grad_(name.split()[0] in names) for name, x in leaves.items()}
    if "sinks" in options:
        options["sinks"] = leaves["sinks"]
    if biases:
        new = tuple(
            replace(bias, **{n: leaves[f"bias {number} {n}"] for n, x in vars(bias).items() if isinstance(x, Tensor)})
            for number, bias in enumerate(several)
        )
        options["bias"] = new if isinstance(biases, tuple) else new[0]
    return leaves, options


def _results(
    call: Call, leaves: dict[str, Tensor], out: Tensor, lse: Tensor | None, *, is_batched: bool = False
) -> Results:
    results = {"output": out.detach()} | ({} if lse is None else {"lse": lse.detach()})
    asked = {name: x for name, x in leaves.items() if x.requires_grad}
    if asked:
        g = torch.Generator().manual_seed(1)
        total = (out.double() * torch.randn(out.shape, generator=g, dtype=torch.float64)).sum()
        if "lse" in GRADIENTS[call.case.gradients] and lse is not None:
            weights = torch.randn(lse.shape, generator=g, dtype=torch.float64)
            total = total + (torch.where(lse.isfinite(), lse, 0).double() * weights).sum()
        of_missing = {"allow_unused": True, "materialize_grads": True}
        if is_batched:
            several = torch.tensor([1.0, -3.0], dtype=torch.float64)
            rows = torch.autograd.grad(total, list(asked.values()), several, is_grads_batched=True, **of_missing)
            found = [(x[0] - x[1]) / 4 for x in rows]
        else:
            found = torch.autograd.grad(total, list(asked.values()), **of_missing)
        results |= {f"gradient of {name}": x for name, x in zip(asked, found, strict=True)}
    return results


def difference(call: Call, mine: Results, theirs: Results) -> str:
    """What differs by more than the dtype may, in words, or an empty text."""
    dtype = DTYPES[call.case.dtype][0]
    limit = ERRORS[dtype]
    for name, want in theirs.items():
        right = torch.promote_types(dtype, torch.float32) if name == "lse" else dtype
        if mine[name].dtype != right:
            return f"{name}: {mine[name].dtype}, not {right}"
        got = mine[name].double()
        if got.shape != want.shape:
            return f"{name}: shape {tuple(got.shape)}, not {tuple(want.shape)}"
        finite = want.isfinite()
        same = torch.equal(got[~finite].nan_to_num(1e9), want[~finite].nan_to_num(1e9))
        if not same or not got[finite].isfinite().all():
            return f"{name}: infinities or NaN in other places"
        # A sum of values that cancel loses as much as its terms have.
        scale = max(want[finite].norm().item(), 0.3 * finite.sum().item() ** 0.5)
        error = (got - want)[finite].norm().item() / scale if finite.any() else 0.0
        if error > limit:
            return f"{name}: off by {error:.2g}, allowed {limit:.2g}"
    return ""


class Refusal(NamedTuple):
    """Cases that raise ValueError, and the words of the error."""

    cases: Callable[[Case], bool]
    words: str
    is_sure: bool = True
    """False if some of the cases have results."""


LISTS = {"chosen", "causal chosen", "window or chosen", "chosen blocks"}
BIASES = {"relative", "grid", "by query, by key", "relative, sinks, key_mask"}
LENGTHS = {"key_lengths", "key_mask, key_lengths", "sinks, softcap, key_lengths"}
FOR_ALL_KEYS = {"documents", "documents per batch", "per document", "neighborhood", "neighborhood of a grid"}
"""Rules of positions that all have a key."""
NOT_IN_LISTS = {"alibi", "dropout", "dropout of a part", "softcap", "sinks, softcap, key_lengths"}
"""Options that the native kernel of lists does not have."""
SIZED = FOR_ALL_KEYS | {"mask", "mask per batch", "blocks"}
BY_BATCH = {"mask_mod", "documents per batch", "mask per batch"}


POSITIONED = {"dropout", "dropout of a part"}
OF_MODULES = {"multihead", "cache", "transformers"}
ON_RANKS = {"one rank", "two ranks", "two ranks by heads"}
LONGNET = {"LongNet", "LongNet, union"}


TENSORS = {"query", "key", "value"}
CAUSAL = {"causal", "causal window", "strided", "global tokens", "documents", "documents per batch", "causal chosen"}
CAUSAL |= {"window or chosen"}


def _is_by_batch(c: Case) -> bool:
    """True for a rule per batch element."""
    of_several = SHAPES[c.shape].batch > 1 and c.rule in ("mask per batch", "chosen", "window or chosen")
    return of_several or c.rule in ("mask_mod", "documents per batch")


def _is_by_key_head(c: Case) -> bool:
    return c.option == "by query, by key" or c.rule in ("chosen", "window or chosen")


def _is_aligned(c: Case) -> bool:
    return SHAPES[c.shape].queries == SHAPES[c.shape].keys


def _is_sized(c: Case, more: int) -> bool:
    """True for a rule that does not have some keys more than the shape."""
    n = SHAPES[c.shape].keys
    return c.rule in SIZED and (c.rule != "blocks" or -(-n // 16) < -(-(n + more) // 16))


def _is_row(c: Case) -> bool:
    """True for queries that are all tokens of a call."""
    s = SHAPES[c.shape]
    return s.queries == s.keys > 0 and s.batch > 0 and s.start is None


NO_SENSE: list[Callable[[Case], bool]] = [
    # Dropout counts positions in a row, and a row has one rule.
    lambda c: c.form in ("packed", "left padded") and (c.option in POSITIONED or c.rule in BY_BATCH | SIZED),
    lambda c: c.form in {"packed", "cache"} | ON_RANKS and not _is_row(c),
    lambda c: c.form == "left padded" and (SHAPES[c.shape].first < 0 or SHAPES[c.shape].batch == 0),
    lambda c: c.form == "merged" and "sinks" in c.option,
    # Arguments that they do not have.
    lambda c: c.form == "cache" and c.option not in ("none", "is_causal", "key_mask"),
    lambda c: (
        c.form in ("cache", "transformers")
        and (c.backend == "dense" or c.backend.startswith(("blockwise", "reference")))
    ),
    lambda c: c.form == "transformers" and c.option in POSITIONED,
    lambda c: c.form in LONGNET and (c.option not in ("none", "is_causal", "key_mask", "scale") or c.rule in SIZED),
    lambda c: c.form in LONGNET and SHAPES[c.shape].start is not None,
    lambda c: c.form in ON_RANKS and c.option in BIASES,
    lambda c: c.form == "multihead" and SHAPES[c.shape].value_dim != SHAPES[c.shape].head_dim,
    # Its keys have as many heads as its queries.
    lambda c: c.form == "multihead" and SHAPES[c.shape].key_heads < SHAPES[c.shape].heads and _is_by_key_head(c),
]
"""Cases that ask another question than the oracle answers."""


def makes_sense(case: Case) -> bool:
    return not any(entry(case) for entry in NO_SENSE)


def _has_dense(c: Case) -> bool:
    """True for a call that PyTorch's dense kernel supports: all pairs, or causal ones of as many queries and keys."""
    s = SHAPES[c.shape]
    fits = c.rule == "all" or (s.first == 0 and _is_aligned(c) and c.option != "scale" and c.form != "chunks")
    is_whole = c.rule in ("all", "causal") and c.option in ("none", "scale", "sinks")
    is_masked = c.form in ("merged", "index", "adaptive", "packed", "left padded", "right padded")
    return is_whole and fits and not is_masked and 0 not in (s.batch, s.queries, s.keys)


REFUSALS = [
    Refusal(lambda c: c.shape == "no batch" and c.rule in BY_BATCH, "expects (a|ids to be a) (non-empty|whole number)"),
    Refusal(
        lambda c: c.shape == "no keys" and c.rule in SIZED,
        "expects (at least one token|(a|ids to be a) (non-empty|whole number))",
    ),
    Refusal(
        lambda c: c.shape == "no queries" and c.rule in ("mask", "mask per batch"), "expects a non-empty bool mask"
    ),
    Refusal(lambda c: c.shape == "no keys" and c.option == "grid", "bias.shape: expected positive sizes"),
    Refusal(lambda c: c.form == "adaptive" and c.option in LENGTHS, "key_lengths: adaptive attention takes a key_mask"),
    Refusal(
        lambda c: c.form == "adaptive" and SHAPES[c.shape].start is not None,
        "start: adaptive attention takes a key_mask",
    ),
    Refusal(lambda c: c.form == "index" and c.rule in LISTS, "expected one with an index of tiles, got Chosen"),
    Refusal(lambda c: c.form == "index" and c.option == "is_causal", "is_causal: not supported with a BlockIndex"),
    Refusal(lambda c: c.rule in LISTS and c.option in BIASES, "bias: not supported with Chosen lists"),
    Refusal(
        lambda c: c.shape == "more queries" and c.rule in FOR_ALL_KEYS | {"blocks"},
        "expects (query positions in|the 61 tokens)",
    ),
    Refusal(lambda c: c.form == "cache" and bool(set(GRADIENTS[c.gradients].split()) & TENSORS), "torch.no_grad"),
    Refusal(
        lambda c: c.form == "cache" and c.rule not in CAUSAL and c.option != "is_causal",
        "a cache needs one that keeps no later keys",
    ),
    Refusal(lambda c: c.form == "cache" and _is_by_batch(c), "a cache needs one for all batch rows"),
    Refusal(lambda c: c.form == "cache" and c.rule in LISTS, "indices: expected lists of"),
    Refusal(lambda c: c.form == "transformers" and _is_by_batch(c), "expected one for all batch elements"),
    Refusal(lambda c: c.form in LONGNET and _is_by_batch(c), "expected one rule for all batch rows"),
    Refusal(lambda c: c.form == "two ranks" and c.rule in ("mask", "mask per batch"), "^mask of"),
    Refusal(lambda c: c.form == "two ranks by heads" and c.rule in LISTS, "does not support Chosen"),
    Refusal(
        lambda c: c.form == "cache" and c.shape != "one token" and c.rule in SIZED - {"blocks"}, "expects|^mask of"
    ),
    Refusal(
        lambda c: c.form == "multihead" and c.option == "is_causal" and not _is_aligned(c),
        "is_causal: without attn_mask it needs as many",
    ),
    Refusal(lambda c: c.form == "slices" and c.option in BIASES, "bias: not supported with in_slices"),
    Refusal(lambda c: c.shape == "more queries" and c.option == "grid", "expected queries inside the grid"),
    Refusal(
        lambda c: (
            c.form == "chunks"
            and c.rule in ("mask", "mask per batch")
            # One chunk otherwise.
            and SHAPES[c.shape].queries > 13
        ),
        "^mask of .* queries from",
    ),
    Refusal(
        lambda c: SHAPES[c.shape].start is not None and c.rule in ("mask", "mask per batch"), "^mask of .* queries from"
    ),
    Refusal(
        lambda c: c.form in {"adaptive", "packed", "left padded", "slices"} | LONGNET and c.rule in LISTS,
        "expected (one with an index|Chosen once)",
    ),
    Refusal(lambda c: c.form == "right padded" and _is_sized(c, 5), "n_keys=|as keys|^mask of"),
    Refusal(
        lambda c: c.form in ("right padded", "left padded", "packed") and c.option == "grid",
        "bias.shape: expected positive sizes",
    ),
    Refusal(lambda c: c.rule in LISTS and c.backend == "dense", "expected one of .* for Chosen lists"),
    Refusal(lambda c: c.backend == "dense" and not _has_dense(c), "backend 'dense' does not support this call: "),
    Refusal(
        lambda c: c.backend == "dense" and c.form in LONGNET | ON_RANKS,
        "backend 'dense' does not support this call: ",
        is_sure=False,
    ),
    Refusal(
        lambda c: (
            c.backend.startswith("native")
            and c.rule in LISTS
            and (c.dtype.startswith("float64") or c.option in NOT_IN_LISTS)
        ),
        "backend 'native' does not support this call: ",
    ),
]
"""Combinations that raise, in the order in which they are looked up."""


def refusal(case: Case) -> list[Refusal]:
    """The errors that a case can raise, or none if it has results."""
    return [entry for entry in REFUSALS if entry.cases(case)]


def has_results(case: Case) -> bool:
    return makes_sense(case) and not refusal(case)


def attempt(case: Case) -> tuple[Call | None, Results | Exception]:
    """The call of a case, and its results or its error. No call, if its instruction set does not run here."""
    before, call = torch.get_default_dtype(), None
    if not runs_here(case):
        return None, {}
    try:
        call = made(case)
        torch.set_default_dtype(DTYPES[case.dtype][1])
        return call, actual(call)
    except Exception as error:
        return call, error
    finally:
        torch.set_default_dtype(before)


def outcome(case: Case) -> str:
    """What is wrong with a case: an empty text if it is right."""
    if not makes_sense(case):
        return ""
    call, mine = attempt(case)
    errors = refusal(case)
    if isinstance(mine, (ValueError, NotImplementedError)):
        right = any(re.search(entry.words, str(mine)) for entry in errors)
        return "" if right else f"refused: {type(mine).__name__}: {mine}"
    if isinstance(mine, Exception):
        return f"failed: {type(mine).__name__}: {str(mine)[:300]}"
    if call is None:
        return ""
    if sure := [entry for entry in errors if entry.is_sure]:
        return f"not refused: {sure[0].words}"
    return difference(call, mine, expected(call, "lse" in mine))


BASES = Case(gradients="none"), Case(gradients="none", rule="causal")


def covering(strength: int = 2, seed: int = 0) -> Iterator[Case]:
    """Cases that meet every combination of ``strength`` values of different axes, in a fixed order.

    A combination that can have results is met by a case that has. One that is refused has a case that is refused.
    """
    draw, names = random.Random(seed), list(AXES)

    def met(values: dict[str, str], axis: str | None = None) -> Iterator[tuple[tuple[str, str], ...]]:
        """The combinations that some values meet, all or those with one axis."""
        for axes in combinations([name for name in names if name in values], strength):
            if axis is None or axis in axes:
                yield tuple((name, values[name]) for name in axes)

    left = dict.fromkeys(
        tuple(zip(axes, values, strict=True))
        for axes in combinations(names, strength)
        for values in product(*(AXES[name] for name in axes))
    )
    for combination in list(left):
        if combination not in left:
            continue
        bases = [replace(base, **dict(combination)) for base in BASES]
        base = next(filter(has_results, bases), None)
        if base is None:
            del left[combination]
            yield from (case for case in bases[:1] if makes_sense(case))
            continue
        chosen = dict(combination)
        for name in draw.sample(names, len(names)):
            if name not in chosen:
                values = draw.sample(list(AXES[name]), len(AXES[name]))
                new = {value: sum(x in left for x in met(chosen | {name: value}, name)) for value in values}
                values = sorted(values, key=new.__getitem__, reverse=True)
                chosen[name] = next(v for v in values if has_results(replace(base, **chosen | {name: v})))
        for done in met(chosen):
            left.pop(done, None)
        yield Case(**chosen)


def runs_here(case: Case) -> bool:
    """False if its instruction set does not run on this processor."""
    try:
        return "native " not in case.backend or set_number(case.backend.removeprefix("native ")) >= 0
    except pytest.skip.Exception:
        return False


def at_random(seed: int) -> Iterator[Case]:
    """Cases without end, with numbers of their own."""
    draw = random.Random(seed)
    while True:
        case = Case(**{name: draw.choice(list(axis)) for name, axis in AXES.items()}, seed=draw.randrange(1 << 30))
        if makes_sense(case):
            yield case


def smallest(case: Case) -> Case:
    """A case that is wrong as another is, with as many values of `Case()` as can be."""
    for name, value in vars(Case()).items():
        simpler = replace(case, **{name: value})
        if outcome(simpler):
            case = simpler
    return case


def parsed(text: str) -> Case:
    """Read the line that `Case` prints."""
    values = dict(part.split("=", 1) for part in text.strip().split(" | "))
    return Case(**{name: int(value) if name == "seed" else value for name, value in values.items()})  # type: ignore[arg-type]
