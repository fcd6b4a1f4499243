"""One table of calls: every rule with every option, shape, dtype, gradient, form and backend.

Each axis is a dict. A case takes one value of each. What it is to give comes from `ringtile.testing.oracle`, or it is a
refusal that `REFUSALS` names. Keys and values that no query reads are NaN.
"""

from __future__ import annotations

import copy
import math
import pickle
import random
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations, pairwise, product
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ringtile import ByKey, ByQuery, Grid, Relative, build_index, sparse_attention
from ringtile.adaptive import AdaptiveAttention, Density
from ringtile.index import clear_cache
from ringtile.kernels.blockwise import chunks
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

Results = dict[str, Tensor]


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


def _documents(s: Shape) -> list[int]:
    return [s.keys // 3, s.keys - s.keys // 3]


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
    "documents": lambda s, g: Causal() & Documents(_documents(s)),
    "documents per batch": lambda s, g: Causal() & Documents(ids=_ids(s)),
    "per document": lambda s, g: per_document(Window(3) | GlobalTokens(1), Documents(_documents(s))),
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
    "native": "native",
    "blockwise": "blockwise",
    "blockwise in parts": "blockwise",
    "dense": "dense",
    "reference": "reference",
}

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
    if shape.memory == "expanded":
        key, value = (x[:, :1].expand_as(x) for x in (key, value))
    pattern = RULES[case.rule](shape, g)
    pattern, rule = pattern if isinstance(pattern, tuple) else (pattern, pattern)
    options = OPTIONS[case.option](shape, g)
    call = Call(case, shape, *(x.to(dtype) for x in (query, key, value)), pattern, rule, options)
    call = call._replace(options=_cast(options, dtype))
    if shape.memory != "expanded" and (read := read_keys(call)) is not None:
        unread = ~read
        call = call._replace(key=_poisoned(call.key, unread), value=_poisoned(call.value, unread))
    if shape.memory == "strided":
        turned = [x.mT.contiguous().mT for x in (call.query, call.key, call.value)]
        call = call._replace(query=turned[0], key=turned[1], value=turned[2])
    return call


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
    pairs = kept_pairs(call.rule, s.batch, s.heads, s.queries, s.keys, start=s.first, **masks)
    return pairs.any(2).view(s.batch, s.key_heads, s.heads // s.key_heads, s.keys).any(2)


def _poisoned(x: Tensor, where: Tensor) -> Tensor:
    return x.masked_fill(where.unsqueeze(3), math.nan)


def plain(call: Call, **more: Any) -> tuple[Tensor, Tensor]:
    """Call `sparse_attention`."""
    s = call.shape
    options = {"start": s.start, "enable_gqa": s.heads != s.key_heads, "backend": BACKENDS[call.case.backend]}
    pattern = more.pop("pattern", call.pattern)
    result = sparse_attention(
        call.query, call.key, call.value, pattern, return_lse=True, **(options | call.options | more)
    )
    return result


def by_index(call: Call) -> tuple[Tensor, Tensor]:
    s = call.shape
    batch = s.batch if call.pattern.batch_size is not None else 1
    index = build_index(call.pattern, s.queries, s.keys, start=s.start, num_heads=s.heads, batch=batch, block=16)
    return plain(call, pattern=index, start=None)


def by_text(call: Call) -> tuple[Tensor, Tensor]:
    return plain(call, pattern=call.pattern if call.pattern.text is None else parse(call.pattern.text))


def copied(call: Call) -> tuple[Tensor, Tensor]:
    pattern = copy.deepcopy(call.pattern)
    return plain(call, pattern=pattern if "Elements" in repr(pattern) else pickle.loads(pickle.dumps(pattern)))


def checkpointed(call: Call) -> tuple[Tensor, Tensor]:
    def compute(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return plain(call._replace(query=q, key=k, value=v))

    out, lse = checkpoint(compute, call.query, call.key, call.value, use_reentrant=False)
    return out, lse


def in_chunks(call: Call) -> tuple[Tensor, Tensor]:
    """A prompt in pieces of 13 queries."""
    cuts = [*range(0, call.shape.queries, 13), call.shape.queries]
    parts = [plain(call.part(a, b)) for a, b in pairwise(cuts)] or [plain(call)]
    return torch.cat([out for out, _ in parts], 2), torch.cat([lse for _, lse in parts], 2)


def vmapped(call: Call) -> tuple[Tensor, Tensor]:
    """Two calls that share everything but their tensors."""
    tensors = [torch.stack([x, x.flip(0) if x.shape[0] == 1 else x]) for x in (call.query, call.key, call.value)]
    out, lse = torch.vmap(lambda q, k, v: plain(call._replace(query=q, key=k, value=v)))(*tensors)
    return out[0], lse[0]


def compiled(call: Call) -> tuple[Tensor, Tensor]:
    torch.compiler.reset()
    compute = torch.compile(lambda q, k, v: plain(call._replace(query=q, key=k, value=v)), backend="aot_eager")
    out, lse = compute(call.query, call.key, call.value)
    return out, lse


def adaptive(call: Call) -> tuple[Tensor, Tensor]:
    """All tiles of the rule: a density of 1."""
    s = call.shape
    choose = AdaptiveAttention(budget=Density(1.0), block=16, allow_future=True)
    options = {"enable_gqa": s.heads != s.key_heads, "backend": BACKENDS[call.case.backend]}
    if s.start is not None:
        options["start"] = s.start
    out, lse = choose(
        call.query, call.key, call.value, pattern=call.pattern, return_lse=True, **(options | call.options)
    )
    return out, lse


def autocast(call: Call) -> tuple[Tensor, Tensor]:
    """Tensors of the call's dtype in a context of the same."""
    dtype = call.query.dtype
    with torch.autocast("cpu", dtype if dtype.itemsize == 2 else torch.bfloat16, enabled=dtype.itemsize != 4):
        return plain(call)


def padded(call: Call) -> tuple[Tensor, Tensor]:
    """More keys, which are no token, after those of the call."""
    s, n, options = call.shape, 5, dict(call.options)
    real = torch.ones(s.batch, s.keys, dtype=torch.bool)
    options["key_mask"] = torch.nn.functional.pad(options.get("key_mask", real), (0, n))
    if isinstance(bias := options.get("bias"), tuple):
        options["bias"] = (bias[0], replace(bias[1], key=_longer(bias[1].key, n)))
    shape = replace(s, keys=s.keys + n, start=s.first)
    key, value = (_longer(x, n) for x in (call.key, call.value))
    return plain(call._replace(shape=shape, key=key, value=value, options=options))


def _longer(x: Tensor, n: int) -> Tensor:
    return torch.cat([x, x.new_full((*x.shape[:2], n, x.shape[3]), math.nan)], 2)


def packed(call: Call) -> tuple[Tensor, Tensor]:
    """All batch elements as documents of one row."""
    s, options = call.shape, dict(call.options)

    def in_a_row(x: Tensor) -> Tensor:
        return x.transpose(0, 1).flatten(1, 2).unsqueeze(0)

    real = torch.ones(s.batch, s.keys, dtype=torch.bool)
    if (lengths := options.pop("key_lengths", None)) is not None:
        real = torch.arange(s.keys) < lengths.unsqueeze(1)
    options["key_mask"] = (options.get("key_mask", real) & real).view(1, -1)
    if isinstance(bias := options.get("bias"), tuple):
        query, key = in_a_row(bias[0].query), in_a_row(bias[1].key)
        options["bias"] = replace(bias[0], query=query), replace(bias[1], key=key)
    pattern = per_document(call.pattern, Documents([s.keys] * s.batch))
    row = call._replace(query=in_a_row(call.query), key=in_a_row(call.key), value=in_a_row(call.value))
    out, lse = plain(row._replace(options=options), pattern=pattern)
    return tuple(x[0].unflatten(1, (s.batch, -1)).transpose(0, 1) for x in (out, lse))  # type: ignore[return-value]


FORMS: dict[str, Callable[[Call], tuple[Tensor, Tensor]]] = {
    "plain": plain,
    "index": by_index,
    "text": by_text,
    "copy": copied,
    "checkpoint": checkpointed,
    "chunks": in_chunks,
    "vmap": vmapped,
    "compiled": compiled,
    "adaptive": adaptive,
    "autocast": autocast,
    "padded": padded,
    "packed": packed,
}

AXES: dict[str, dict[str, Any]] = {
    "rule": RULES,
    "option": OPTIONS,
    "shape": SHAPES,
    "dtype": DTYPES,
    "gradients": GRADIENTS,
    "form": FORMS,
    "backend": BACKENDS,
}


def expected(call: Call) -> Results:
    """The results of the oracle."""
    leaves, options = _leaves(call)
    out, lse = attention(leaves["query"], leaves["key"], leaves["value"], call.rule, start=call.shape.start, **options)
    return _results(call, leaves, out, lse)


def actual(call: Call) -> Results:
    """The results of a form of the call."""
    if call.case.backend == "blockwise in parts":
        clear_cache()
        with patch.multiple(chunks, **IN_PARTS):
            return _actual(call)
    return _actual(call)


def _actual(call: Call) -> Results:
    leaves, options = _leaves(call)
    call = call._replace(query=leaves["query"], key=leaves["key"], value=leaves["value"], options=options)
    out, lse = FORMS[call.case.form](call)
    return _results(call, leaves, out, lse)


def _leaves(call: Call) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a call, those that get a gradient among them, and its options with the same tensors."""
    names = GRADIENTS[call.case.gradients].split()
    leaves = {"query": call.query, "key": call.key, "value": call.value}
    options = dict(call.options)
    if "sinks" in options:
        leaves["sinks"] = options["sinks"]
    biases = options.get("bias", ())
    for number, bias in enumerate(biases if isinstance(biases, tuple) else (biases,)):
        leaves |= {f"bias {number} {n}": x for n, x in vars(bias).items() if isinstance(x, Tensor)}
    leaves = {name: x.detach().requires_grad_(name.split()[0] in names) for name, x in leaves.items()}
    if "sinks" in options:
        options["sinks"] = leaves["sinks"]
    if biases:
        several = biases if isinstance(biases, tuple) else (biases,)
        new = tuple(
            replace(bias, **{n: leaves[f"bias {number} {n}"] for n, x in vars(bias).items() if isinstance(x, Tensor)})
            for number, bias in enumerate(several)
        )
        options["bias"] = new if isinstance(biases, tuple) else new[0]
    return leaves, options


def _results(call: Call, leaves: dict[str, Tensor], out: Tensor, lse: Tensor) -> Results:
    results = {"output": out.detach(), "lse": lse.detach()}
    asked = {name: x for name, x in leaves.items() if x.requires_grad}
    if asked:
        g = torch.Generator().manual_seed(1)
        grads = [torch.randn(x.shape, generator=g, dtype=torch.float64) for x in (out, lse)]
        total = (out.double() * grads[0]).sum()
        if "lse" in GRADIENTS[call.case.gradients]:
            total = total + (torch.where(lse.isfinite(), lse, 0).double() * grads[1]).sum()
        found = torch.autograd.grad(total, list(asked.values()), allow_unused=True, materialize_grads=True)
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


def _makes_no_sense(case: Case) -> bool:
    """True for a case that asks another question than its oracle answers."""
    s = SHAPES[case.shape]
    if case.form == "packed":
        # Dropout counts positions in the row, and a row has one rule.
        in_rows = s.queries == s.keys > 0 and s.batch > 0 and s.start is None
        return not in_rows or case.option in ("dropout", "dropout of a part") or case.rule in BY_BATCH | SIZED
    return False


def _is_dense(case: Case) -> bool:
    # It computes all pairs, and causal ones.
    return case.backend == "dense"


REFUSALS = [
    Refusal(lambda c: c.shape == "no batch" and c.rule in ("mask_mod", "documents per batch", "mask per batch"), "."),
    Refusal(lambda c: c.shape == "no keys" and c.rule in FOR_ALL_KEYS | {"mask", "mask per batch", "blocks"}, "."),
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
    Refusal(lambda c: c.shape == "more queries" and c.rule in FOR_ALL_KEYS | {"blocks"}, "expects"),
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
    Refusal(lambda c: c.form in ("adaptive", "packed") and c.rule in LISTS, "expected (one with an index|Chosen once)"),
    Refusal(lambda c: c.form == "padded" and c.rule in SIZED, ".", is_sure=False),
    Refusal(lambda c: c.form in ("padded", "packed") and c.option == "grid", "bias.shape: expected positive sizes"),
    Refusal(lambda c: c.rule in LISTS and _is_dense(c), "expected one of .* for Chosen lists"),
    Refusal(_is_dense, "backend 'dense' does not support this call", is_sure=False),
    Refusal(
        lambda c: (
            c.backend == "native" and c.rule in LISTS and (c.dtype.startswith("float64") or c.option in NOT_IN_LISTS)
        ),
        "backend 'native' does not support this call: ",
    ),
]
"""Combinations that raise, in the order in which they are looked up."""


def refusal(case: Case) -> list[Refusal]:
    """The errors that a case can raise, or none if it has results."""
    return [entry for entry in REFUSALS if entry.cases(case)]


def outcome(case: Case) -> str:
    """What is wrong with a case: an empty text if it is right."""
    if _makes_no_sense(case):
        return ""
    before, errors = torch.get_default_dtype(), refusal(case)
    try:
        call = made(case)
        torch.set_default_dtype(DTYPES[case.dtype][1])
        mine = actual(call)
    except (ValueError, NotImplementedError) as error:
        right = any(re.search(entry.words, str(error)) for entry in errors)
        return "" if right else f"refused: {type(error).__name__}: {error}"
    except Exception as error:
        return f"failed: {type(error).__name__}: {str(error)[:300]}"
    finally:
        torch.set_default_dtype(before)
    if sure := [entry for entry in errors if entry.is_sure]:
        return f"not refused: {sure[0].words}"
    return difference(call, mine, expected(call))


def covering(strength: int = 2, seed: int = 0) -> Iterator[Case]:
    """Cases that meet every combination of ``strength`` values of different axes, in a fixed order."""
    draw, names = random.Random(seed), list(AXES)

    def met(chosen: dict[str, str], axis: str | None = None) -> set[tuple[tuple[str, str], ...]]:
        """The combinations that some values meet, all or those with one axis."""
        pairs = [(name, chosen[name]) for name in names if name in chosen]
        found = combinations(pairs, strength)
        return {x for x in found if axis is None or any(name == axis for name, _ in x)}

    left = dict.fromkeys(
        tuple(zip(axes, values, strict=True))
        for axes in combinations(names, strength)
        for values in product(*(AXES[name] for name in axes))
    )
    for combination in list(left):
        if combination not in left:
            continue
        chosen = dict(combination)
        for name in draw.sample(names, len(names)):
            if name not in chosen:
                values = draw.sample(list(AXES[name]), len(AXES[name]))
                new = [len(met({**chosen, name: value}, name) & left.keys()) for value in values]
                chosen[name] = values[new.index(max(new))]
        for done in met(chosen) & left.keys():
            del left[done]
        yield Case(**chosen)


def at_random(seed: int) -> Iterator[Case]:
    """Cases without end, with numbers of their own."""
    draw = random.Random(seed)
    while True:
        yield Case(**{name: draw.choice(list(axis)) for name, axis in AXES.items()}, seed=draw.randrange(1 << 30))


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
