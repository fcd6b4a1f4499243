"""Bad input is refused before any work: a ValueError that names the argument, what was expected and what came."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from strategies import checkerboard
from torch import Tensor, nn

from ringtile import (
    Relative,
    SparseLanguageModel,
    SparseMultiheadAttention,
    SparseTransformer,
    build_index,
    dilated_attention,
    from_score_mod,
    functional,
    in_slices,
    longnet_attend,
    merge_attention,
    sparse_attention,
)
from ringtile.adaptive import AdaptiveAttention, IndexedAttention, audit, index_loss, index_topk
from ringtile.adaptive.choice import Choice
from ringtile.functional.cache import LayerCache
from ringtile.index import cache_info, clear_cache, to_block_mask
from ringtile.kernels.reference import attention_reference
from ringtile.patterns import (
    Blocks,
    Causal,
    Dense,
    Documents,
    Elements,
    Strided,
    Window,
    from_mask,
    parse,
    per_head,
    streaming,
)


def zeros(*shape: int, **options: Any) -> Tensor:
    return torch.zeros(shape, **options)


def freed(x: Tensor) -> Tensor:
    x.untyped_storage().resize_(0)
    return x


INDEX = build_index(Causal(), 6, 8)
META = {"device": "meta"}

# What to change in a call of two batch rows, four heads, two key heads, 6 queries, 8 keys, D 3 and Dv 5, and what the
# message says of it: the argument first, what was expected, what came.
CALLS: dict[str, tuple[dict[str, Any], str, str, str]] = {
    # Shapes.
    "query of three dimensions": ({"query": zeros(4, 6, 3)}, "query", "four dimensions", "[4, 6, 3]"),
    "key of five dimensions": ({"key": zeros(1, 2, 2, 8, 3)}, "key", "four dimensions", "[1, 2, 2, 8, 3]"),
    "value of two dimensions": ({"value": zeros(8, 5)}, "value", "four dimensions", "[8, 5]"),
    "batch of key": ({"key": zeros(3, 2, 8, 3)}, "key", "batch", "[3, 2, 8, 3]"),
    "head_dim of key": ({"key": zeros(2, 2, 8, 4)}, "key", "head_dim", "[2, 2, 8, 4]"),
    "no head_dim": ({"query": zeros(2, 4, 6, 0), "key": zeros(2, 2, 8, 0)}, "query", "head_dim", "[2, 4, 6, 0]"),
    "batch of value": ({"value": zeros(1, 2, 8, 5)}, "value", "batch", "[1, 2, 8, 5]"),
    "heads of value": ({"value": zeros(2, 4, 8, 5)}, "value", "heads", "[2, 4, 8, 5]"),
    "length of value": ({"value": zeros(2, 2, 7, 5)}, "value", "length", "[2, 2, 7, 5]"),
    "head ratio": ({"query": zeros(2, 3, 6, 3)}, "key", "a divisor", "[2, 3, 6, 3]"),
    "more key heads than heads": ({"query": zeros(2, 1, 6, 3)}, "key", "a divisor", "[2, 1, 6, 3]"),
    "no key heads": ({"key": zeros(2, 0, 8, 3), "value": zeros(2, 0, 8, 5)}, "key", "a divisor", "[2, 0, 8, 3]"),
    "grouped heads not asked for": ({"enable_gqa": False}, "key", "enable_gqa=True", "enable_gqa=False"),
    "no heads": (
        {"query": zeros(2, 0, 6, 3), "key": zeros(2, 0, 8, 3), "value": zeros(2, 0, 8, 5)},
        "query",
        "at least one head",
        "[2, 0, 6, 3]",
    ),
    # Dtypes and devices.
    "integers": ({"query": zeros(2, 4, 6, 3, dtype=torch.int64)}, "query", "float32", "torch.int64"),
    "complex": ({"query": zeros(2, 4, 6, 3, dtype=torch.complex64)}, "query", "float32", "torch.complex64"),
    "dtype of key": ({"key": zeros(2, 2, 8, 3, dtype=torch.float64)}, "key", "the same", "torch.float64"),
    "dtype of value": ({"value": zeros(2, 2, 8, 5, dtype=torch.bfloat16)}, "value", "the same", "torch.bfloat16"),
    "no data": (
        {"query": zeros(2, 4, 6, 3, **META), "key": zeros(2, 2, 8, 3, **META), "value": zeros(2, 2, 8, 5, **META)},
        "query",
        "holds data",
        "meta",
    ),
    # Masks.
    "shape of key_mask": ({"key_mask": zeros(2, 6).bool()}, "key_mask", "(2, 8)", "[2, 6]"),
    "key_mask for each query": ({"key_mask": zeros(2, 6, 8).bool()}, "key_mask", "(2, 8)", "[2, 6, 8]"),
    "negative key_lengths": ({"key_lengths": torch.tensor([8, -1])}, "key_lengths", "[0, 8]", "[8, -1]"),
    "key_lengths past the keys": ({"key_lengths": torch.tensor([9, 0])}, "key_lengths", "[0, 8]", "[9, 0]"),
    # Numbers.
    "certain dropout": ({"dropout_p": 1.0}, "dropout_p", "[0, 1)", "1.0"),
    "nearly certain dropout": ({"dropout_p": 1 - 1e-6}, "dropout_p", "65535/65536", "0.999999"),
    "negative dropout": ({"dropout_p": -0.1}, "dropout_p", "[0, 1)", "-0.1"),
    "dropout nan": ({"dropout_p": math.nan}, "dropout_p", "[0, 1)", "nan"),
    "two seeds": ({"dropout_p": 0.1, "seed": torch.tensor([1, 2])}, "seed", "one int64", "[2]"),
    "narrow seed": ({"seed": torch.tensor([1], dtype=torch.int32)}, "seed", "int64", "int32"),
    "seed of 65 bits": ({"dropout_p": 0.1, "seed": 2**64}, "seed", "64-bit", str(2**64)),
    "seed of no integer": ({"dropout_p": 0.1, "seed": 1.5}, "seed", "integer", "1.5"),
    "negative softcap": ({"softcap": -1.0}, "softcap", ">= 0", "-1.0"),
    "infinite softcap": ({"softcap": math.inf}, "softcap", "finite", "inf"),
    "softcap nan": ({"softcap": math.nan}, "softcap", "finite", "nan"),
    "infinite scale": ({"scale": -math.inf}, "scale", "finite", "-inf"),
    "scale nan": ({"scale": math.nan}, "scale", "finite", "nan"),
    "learned scale": ({"scale": nn.Parameter(torch.tensor(0.3))}, "scale", "query * scale, with", "a Parameter"),
    "scale of text": ({"scale": "a"}, "scale", "a finite number", "'a'"),
    "scale of truth": ({"scale": True}, "scale", "a finite number", "True"),
    "learned softcap": ({"softcap": nn.Parameter(torch.tensor(20.0))}, "softcap", ">= 0", "a Parameter"),
    "softcap of truth": ({"softcap": True}, "softcap", ">= 0", "True"),
    "learned dropout": ({"dropout_p": torch.tensor(0.0)}, "dropout_p", "[0, 1)", "a Tensor"),
    "dropout of truth": ({"dropout_p": False}, "dropout_p", "[0, 1)", "False"),
    "start of no integer": ({"start": 1.5}, "start", "integer", "1.5"),
    "start of no number": ({"start": "now"}, "start", "integer", "'now'"),
    "start too far": ({"start": 2**40 - 5}, "start", "less than 2**40", f"start={2**40 - 5}"),
    "start too far before": ({"start": 7 - 2**40}, "start", "less than 2**40", f"start={7 - 2**40}"),
    "start of 65 bits": ({"start": 2**64}, "start", "less than 2**40", str(2**64)),
    # Numbers for each head.
    # Backends.
    "unknown backend": ({"backend": "fastest"}, "backend", "blockwise", "'fastest'"),
    "backend that cannot serve": ({"backend": "dense", "pattern": Window(2)}, "backend 'dense'", "dense", "window(2)"),
    "backend without the option": ({"backend": "dense", "softcap": 1.0}, "backend 'dense'", "softcap", "1.0"),
    "causal of unequal lengths": (
        {"backend": "dense", "is_causal": True},
        "backend 'dense'",
        "as many queries",
        "call.start=2",
    ),
    # Patterns.
    "text of no pattern": ({"pattern": "causl"}, "pattern", "did you mean 'causal'?", "'causl'"),
    "class of a pattern": ({"pattern": Causal}, "pattern", "BlockMask", "the class Causal: write Causal()"),
    "number": ({"pattern": 3}, "pattern", "its text", "int"),
    "function": ({"pattern": checkerboard}, "pattern", "BlockMask", "function"),
    "freed matrix": ({"pattern": freed(torch.ones(1, 1).bool())}, "pattern", "memory", "[1, 1]"),
    "float matrix": ({"pattern": torch.ones(1, 1)}, "blocks", "bool matrix", "torch.float32"),
    "matrix of other lengths": ({"pattern": zeros(1, 2).bool()}, "blocks of 128 tokens", "1 columns", "2"),
    "mask of pairs": ({"pattern": zeros(6, 8).bool()}, "blocks of 128 tokens", "patterns.from_mask(mask)", "got 8"),
    "mask of pairs of each head": (
        {"pattern": zeros(2, 4, 6, 8).bool()},
        "blocks expects",
        "patterns.from_mask(mask)",
        "[2, 4, 6, 8]",
    ),
    "mask of other lengths": (
        {"pattern": from_mask(torch.eye(8).bool())},
        "mask of 8 queries",
        "8 keys",
        "grid.n_queries=6",
    ),
    "mask from another position": (
        {"pattern": from_mask(zeros(6, 8).bool()), "start": 0},
        "mask of",
        "8 keys",
        "start=0",
    ),
    "mask for other heads": (
        {"pattern": from_mask(torch.eye(8).view(2, 4, 8).bool())},
        "num_heads",
        "written for 2",
        "4",
    ),
    "matrix for other heads": ({"pattern": zeros(3, 1, 1).bool()}, "num_heads", "written for 3", "4"),
    "other heads": ({"pattern": per_head([Dense(), Causal()])}, "num_heads", "written for 2", "4"),
    "other batch": ({"pattern": Documents(ids=zeros(3, 8).long())}, "batch", "written for 3", "2"),
    "other documents": ({"pattern": Documents([3, 4])}, "documents of 7 tokens", "n_keys=7", "n_keys=8"),
    "queries outside documents": ({"pattern": Documents([3, 5]), "start": 3}, "documents", "[0, 8)", "start=3"),
    "queries outside blocks": ({"pattern": zeros(1, 1).bool(), "start": 123}, "blocks", "[0, 128)", "start=123"),
    "block mask of other lengths": (
        {"pattern": to_block_mask(build_index(Causal(), 300))},
        "block mask of 300 queries",
        "300 keys",
        "n_keys=8",
    ),
    # Indices.
    "index of other lengths": (
        {"pattern": build_index(Causal(), 7)},
        "pattern",
        "an index with n_queries=6, n_keys=8, got",
        "index.n_queries=7, index.n_keys=7, index.start=0",
    ),
    "index of another start": ({"pattern": INDEX, "start": 0}, "pattern", "start=0, got", "index.start=2"),
    "index for other heads": (
        {"pattern": build_index(per_head([Dense(), Causal()]), 6, 8, num_heads=2)},
        "pattern",
        "groups [1 or 2, 1 or 4]",
        "[1, 2]",
    ),
    "index for another batch": (
        {"pattern": build_index(Documents(ids=torch.arange(24).view(3, 8) // 5), 6, 8, num_heads=4, batch=3)},
        "pattern",
        "groups [1 or 2, 1 or 4]",
        "[3, 1]",
    ),
    "causal index": ({"pattern": INDEX, "is_causal": True}, "is_causal", "Causal()", "BlockIndex"),
    "device of an index": ({"pattern": INDEX.to("meta")}, "pattern", "cpu", "meta"),
}


def told(argument: str, expected: str, got: str) -> str:
    """What a message must match: the argument first, then what was expected and what came, and not for long."""
    return rf"(?s)\A(?=.{{,400}}\Z){re.escape(argument)}.*?(?=.*{re.escape(got)}).*{re.escape(expected)}"


GOOD = {
    "query": zeros(2, 4, 6, 3),
    "key": zeros(2, 2, 8, 3),
    "value": zeros(2, 2, 8, 5),
    "pattern": None,
    "enable_gqa": True,
}


@pytest.mark.parametrize(("change", "argument", "expected", "got"), CALLS.values(), ids=CALLS)
def test_bad_calls(change: dict[str, Any], argument: str, expected: str, got: str) -> None:
    assert sparse_attention(**GOOD).shape == (2, 4, 6, 5)
    with pytest.raises(ValueError, match=told(argument, expected, got)):
        sparse_attention(**GOOD | change)


TENSORS = {name: GOOD[name] for name in ("query", "key", "value")} | {
    "key_mask": zeros(2, 8).bool(),
    "key_lengths": zeros(2).long(),
    "alibi_slopes": zeros(4),
    "sinks": zeros(4),
    "head_at": zeros(4).long(),
    "batch_at": zeros(2).long(),
    "seed": zeros(1).long(),
}
SPOILED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "freed": (lambda x: freed(x.clone()), "freed storage"),
    "sparse": (Tensor.to_sparse, "sparse_coo"),
    "a list": (Tensor.tolist, r"(list|\[0\])\Z"),
    "an array": (Tensor.numpy, "array"),
    "another device": (lambda x: x.to("meta"), "meta"),
    "complex": (lambda x: x.to(torch.complex64), "complex64"),
    "a dimension more": (lambda x: torch.stack([x, x]), r"shape=torch\.Size\(\[2, "),
}


@pytest.mark.parametrize("kind", SPOILED)
@pytest.mark.parametrize("name", TENSORS)
def test_every_tensor_is_checked(name: str, kind: str) -> None:
    spoil, got = SPOILED[kind]
    for backend in (None, "blockwise", "reference"):
        with pytest.raises(ValueError, match=rf"\A{name}: expected .*, got .*{got}"):
            sparse_attention(**GOOD | {"dropout_p": 0.1, "backend": backend, name: spoil(TENSORS[name])})


@pytest.mark.parametrize("backend", ["blockwise", "reference"])
@pytest.mark.parametrize("name", [name for name, row in CALLS.items() if not {"backend", "pattern"} & row[0].keys()])
def test_every_backend_refuses(name: str, backend: str) -> None:
    with pytest.raises(ValueError, match=re.escape(CALLS[name][1])):
        sparse_attention(**GOOD | CALLS[name][0], backend=backend)


@pytest.mark.parametrize("name", ["shape of key_mask", "certain dropout", "infinite scale", "unknown backend"])
def test_refused_before_any_work(name: str) -> None:
    clear_cache()
    with pytest.raises(ValueError, match=re.escape(CALLS[name][1])):
        sparse_attention(**GOOD | CALLS[name][0] | {"pattern": Elements(checkerboard)})
    assert cache_info().misses == 0


MERGES: dict[str, tuple[list[Tensor], list[Tensor], str]] = {
    "nothing": ([], [], "len(outs)=0"),
    "fewer lses": ([zeros(1, 2, 3, 4)] * 2, [zeros(1, 2, 3)], "len(lses)=1"),
    "shape of an out": ([zeros(1, 2, 3, 4), zeros(1, 2, 3, 5)], [zeros(1, 2, 3)] * 2, "[1, 2, 3, 5]"),
    "shape of an lse": ([zeros(1, 2, 3, 4)] * 2, [zeros(1, 2, 3), zeros(1, 2, 4)], "[1, 2, 4]"),
    "lse with a head_dim": ([zeros(1, 2, 3, 4)], [zeros(1, 2, 3, 1)], "[1, 2, 3, 1]"),
    "dtypes of outs": ([zeros(1, 2, 3, 4), zeros(1, 2, 3, 4).double()], [zeros(1, 2, 3)] * 2, "torch.float64"),
    "integers": ([zeros(1, 2, 3, 4).long()], [zeros(1, 2, 3)], "torch.int64"),
    "devices": ([zeros(1, 2, 3, 4)] * 2, [zeros(1, 2, 3), zeros(1, 2, 3, **META)], "meta"),
}


@pytest.mark.parametrize(("outs", "lses", "got"), MERGES.values(), ids=MERGES)
def test_bad_merges(outs: list[Tensor], lses: list[Tensor], got: str) -> None:
    with pytest.raises(ValueError, match=told("outs, lses: expected", "", got)):
        merge_attention(outs, lses)


@pytest.mark.parametrize("spoil", [freed, Tensor.to_sparse], ids=["freed", "sparse"])
def test_merged_parts_have_memory(spoil: Callable[[Tensor], Tensor]) -> None:
    for name, which in (("outs", 0), ("lses", 1)):
        parts = [zeros(1, 2, 3, 4), zeros(1, 2, 3)]
        parts[which] = spoil(parts[which])
        with pytest.raises(ValueError, match=f"{name}: expected .*, got "):
            merge_attention(parts[:1], parts[1:])
    # Tensors that never had memory are not freed.
    assert merge_attention([zeros(1, 2, 3, 4, **META)], [zeros(1, 2, 3, **META)])[0].is_meta


@pytest.mark.parametrize("backend", [None, "blockwise", "dense"])
def test_sparse_gradients_are_refused(backend: str | None) -> None:
    q = torch.randn(1, 2, 6, 4, requires_grad=True)
    out, lse = sparse_attention(q, q, q, Causal(), return_lse=True, backend=backend)
    for name, outputs, grads in (
        ("out_grad", [out], [zeros(1, 2, 6, 4).to_sparse()]),
        ("lse_grad", [out, lse], [zeros(1, 2, 6, 4), zeros(1, 2, 6).to_sparse()]),
    ):
        with pytest.raises(ValueError, match=f"{name}: expected torch.strided, got x.layout=torch.sparse_coo"):
            torch.autograd.grad(outputs, q, grads, retain_graph=True)


def test_nested_tensors_are_refused() -> None:
    with warnings.catch_warnings():
        # PyTorch warns that they are a prototype.
        warnings.simplefilter("ignore")
        x = torch.nested.nested_tensor([zeros(4, 6, 3)] * 2)
    with pytest.raises(ValueError, match=r"query: expected torch\.strided, got a nested tensor"):
        sparse_attention(x, x, x)


PARTS: dict[str, tuple[Callable[[], Any], str]] = {
    "endless window": (lambda: Window(2**40), f"left={2**40}"),
    "negative sinks": (lambda: streaming(-1, 4), "tokens=-1"),
    "mask of numbers": (lambda: from_mask(torch.ones(2, 2)), "float32"),
    "mask of one dimension": (lambda: from_mask(torch.ones(2).bool()), "[2]"),
    "empty mask": (lambda: from_mask(torch.ones(0, 2).bool()), "[0, 2]"),
    "sparse matrix": (lambda: Blocks(torch.ones(2, 2).bool().to_sparse()), "matrix.layout=torch.sparse_coo"),
    "sparse mask": (lambda: from_mask(torch.ones(2, 2).bool().to_sparse()), "mask.layout=torch.sparse_coo"),
    "no mask_mod": (lambda: Elements.from_mask_mod(3), "mask_mod=3"),
    "mask_mod of numbers": (
        lambda: build_index(Elements.from_mask_mod(lambda b, h, q_idx, kv_idx: q_idx - kv_idx), 8),
        "torch.int64",
    ),
    "branches of unequal number": (lambda: longnet_attend([8, 16], [1]), "dilation_rates=[1]"),
    "branches without tokens": (lambda: longnet_attend([0], [1]), "segment_lengths=0"),
    "rule with an if": (
        lambda: build_index(Elements(lambda head, query, key: key < query if query > 3 else key > 3), 8),
        "torch.where in place of and and if, got RuntimeError: Boolean value of Tensor",
    ),
    "rule of two arguments": (
        lambda: build_index(Elements(lambda query, key: key < query), 8),
        "fn to compute on three tensors, mask_mod on four, with & and torch.where in place of and and if, got Type",
    ),
    "mask_mod with an if": (
        lambda: build_index(Elements.from_mask_mod(lambda b, h, q_idx, kv_idx: q_idx < kv_idx if q_idx > 3 else h), 8),
        "torch.where in place of and and if, got RuntimeError: vmap: It looks like",
    ),
    "texts of documents": (lambda: Documents(ids="abc"), "ids to be a tensor or a list of numbers, got 'abc'"),
    "documents of unequal rows": (lambda: Documents(ids=[[0, 1], [0]]), "ids to be a tensor or a list of numbers"),
    "list of a mask of numbers": (lambda: from_mask([[1, 0]]), "mask.dtype=torch.int64"),
    "list of a matrix of numbers": (lambda: Blocks([[1, 0]]), "matrix.dtype=torch.int64"),
    "reference of lists": (
        lambda: attention_reference(*[zeros(1, 1, 2, 3)] * 3, Causal(), sinks=[0.0]),
        "sinks: expected shape (1,), got [0.0]",
    ),
    "heads that are no patterns": (lambda: per_head([3]), "got int"),
    "unknown name": (lambda: parse("causal & windows(3)"), "windows"),
    "unknown argument": (lambda: parse("window(width=3)"), "width"),
    "negative window in words": (lambda: parse("window(-3)"), "-3"),
    "no pattern": (lambda: build_index(3, 8), "pattern: expected a Pattern or its text, got int"),
    "class of a pattern": (lambda: build_index(Causal, 8), "got the class Causal: write Causal()"),
    "head of a class": (lambda: per_head([Dense(), Causal]), "got the class Causal: write Causal()"),
    "index too far": (lambda: build_index(Causal(), 8, start=2**40 - 7), f"start={2**40 - 7}"),
    "index too far before": (lambda: build_index(Strided(3), 8, start=7 - 2**40), f"start={7 - 2**40}"),
    "drawing too far": (lambda: Causal().draw(8, 8, start=2**40 - 7), f"start={2**40 - 7}"),
}


@pytest.mark.parametrize(("make", "got"), PARTS.values(), ids=PARTS)
def test_bad_patterns_and_indices(make: Callable[[], Any], got: str) -> None:
    with pytest.raises(ValueError, match=re.escape(got)):
        make()


def test_the_same_is_refused_while_compiling() -> None:
    torch._dynamo.reset()
    pattern = Documents([3, 4])
    attend = torch.compile(lambda x: sparse_attention(x, x, x, pattern), backend="eager")
    with pytest.raises(Exception, match="documents of 7 tokens expects n_keys=7, got n_keys=8"):
        attend(zeros(1, 1, 8, 2))


def test_lists_and_arrays_make_the_patterns_of_their_tensors() -> None:
    starts, ids, mask = [0, 2, 5], [[0, 0, 1], [0, 1, 1]], [[True, False], [True, True]]
    for read in (list, tuple, lambda x: torch.tensor(x).numpy()):
        assert Documents(cu_seqlens=read(starts)) == Documents([2, 3])
        assert Documents(ids=read(ids)) == Documents(ids=torch.tensor(ids))
        assert from_mask(read(mask)).draw(2) == Causal().draw(2)
        assert Blocks(read(mask)) == Blocks(torch.tensor(mask))
        assert Blocks(row_ptr=read([0, 1, 3]), col=read([0, 0, 1])).draw(256, width=2) == Causal().draw(2)


def test_modules_and_functions_name_what_is_no_tensor() -> None:
    x, q = zeros(2, 8, 16), zeros(2, 4, 8, 4)
    pad, keep = [[False] * 8] * 2, [[True] * 8] * 2
    model = SparseTransformer(1, 16, 4, is_causal=True)
    layers = SparseMultiheadAttention(16, 4, batch_first=True, pattern=Causal())
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("query", lambda: layers(x.tolist(), x, x)),
        ("key_padding_mask", lambda: layers(x, x, x, key_padding_mask=pad)),
        ("attn_mask", lambda: layers(x, x, x, attn_mask=pad)),
        ("x", lambda: model(x.tolist())),
        ("key_mask", lambda: model(x, keep)),
        ("positions", lambda: model(x, positions=list(range(8)))),
        ("tokens", lambda: SparseLanguageModel(9, model).eval().generate([[1, 2]], 1)),
        ("key", lambda: LayerCache(Causal()).attend(q, q.tolist(), q)),
        ("key_mask", lambda: LayerCache(Causal()).attend(q, q, q, key_mask=keep)),
        ("key_mask", lambda: in_slices(2)(q, q, q, key_mask=keep)),
        ("key_mask", lambda: AdaptiveAttention()(q, q, q, key_mask=keep)),
        ("key_mask", lambda: IndexedAttention(4, 4, keys=32, dim=2)(q, q, q, key_mask=keep)),
        ("key_mask", lambda: index_topk(q, q, 4, groups=4, key_mask=keep)),
        ("weights", lambda: index_topk(q, q, 4, groups=4, weights=pad)),
        ("index_key", lambda: index_loss(q, pad, q, q, groups=4)),
        ("indices", lambda: index_loss(q, q, q, q, groups=4, indices=pad)),
        ("pools", lambda: index_loss(q, q, q, q, groups=4, pools=pad)),
        ("rows", lambda: index_loss(q, q, q, q, groups=4, rows=[0])),
        ("q", lambda: attention_reference(q.tolist(), q, q, Causal())),
        ("k", lambda: attention_reference(q, q.tolist(), q, Causal())),
        ("v", lambda: attention_reference(q, q, q.tolist(), Causal())),
        ("lses", lambda: merge_attention([q], [[0.0]])),
        ("weight", lambda: Relative.t5([[1.0]], 3, 3, bidirectional=True)),
    ]
    for name, call in calls:
        with pytest.raises(ValueError, match=rf"\A{name}: expected a tensor, got list\Z"):
            call()
    with pytest.raises(ValueError, match=r"index: expected a BlockIndex, got Causal"):
        audit(q, q, q, Causal())


@pytest.mark.parametrize("scale", ["a", True, math.nan, nn.Parameter(torch.tensor(0.3))])
def test_a_scale_that_is_no_number_is_refused_by_every_function(scale: Any) -> None:
    q = zeros(1, 2, 8, 4)
    calls: list[Callable[..., Any]] = [
        lambda **how: dilated_attention(q, q, q, [4], [1], **how),
        lambda **how: in_slices(2)(q, q, q, **how),
        lambda **how: attention_reference(q, q, q, Causal(), **how),
        lambda **how: AdaptiveAttention(min_length=9)(q, q, q, **how),
        lambda **how: AdaptiveAttention()(q, q, q, **how),
        lambda **how: Choice(min_length=9).view(q, q, **how),
        lambda **how: IndexedAttention(2, 4, keys=32, dim=2)(q, q, q, **how),
        lambda **how: index_loss(q, q, q, q, groups=2, **how),
        lambda **how: audit(q, q, q, build_index(Causal(), 8), **how),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"\Ascale: expected a finite number, got "):
            call(scale=scale)


def test_dropout_and_temperature_are_numbers() -> None:
    model = SparseTransformer(1, 16, 4, is_causal=True)
    calls: list[tuple[str, Callable[[Any], Any]]] = [
        ("dropout", lambda p: SparseMultiheadAttention(16, 4, dropout=p)),
        ("dropout", lambda p: SparseTransformer(1, 16, 4, dropout=p)),
        ("temperature", lambda t: SparseLanguageModel(9, model).eval().generate(zeros(1, 2).long(), 1, temperature=t)),
    ]
    for wrong in ("a", True, nn.Parameter(torch.tensor(0.1)), math.nan):
        for name, call in calls:
            with pytest.raises(ValueError, match=rf"\A{name}: expected a .*, got "):
                call(wrong)


def test_numbers_of_numpy_are_numbers() -> None:
    np = pytest.importorskip("numpy")
    q = torch.randn(1, 2, 8, 4)
    want = sparse_attention(q, q, q, Causal(), scale=0.25, softcap=2.0)
    for kind in (np.float16, np.float32, np.float64):
        assert torch.equal(sparse_attention(q, q, q, Causal(), scale=kind(0.25), softcap=kind(2)), want)


def test_heads_and_tokens_that_look_exchanged_warn() -> None:
    x = zeros(2, 600, 8, 4)
    with pytest.warns(
        UserWarning, match=r"expected \[B, H, N, D\], got .*8 tokens of 600 heads. Is it \[B, N, H, D\]\?"
    ):
        sparse_attention(x, x, x, Causal())
    # Heads of a model, a step of generation, a few keys, and many heads of as many tokens.
    for heads, n_queries, n_keys in ((128, 4, 4), (300, 1, 1), (300, 1, 8), (300, 8, 9), (300, 40, 40)):
        key = zeros(1, heads, n_keys, 4)
        sparse_attention(zeros(1, heads, n_queries, 4), key, key, Causal())


def test_the_package_has_the_functions_of_its_reference() -> None:
    assert from_score_mod is functional.from_score_mod
