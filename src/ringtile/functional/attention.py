"""Attention over the kept pairs of a pattern."""

from __future__ import annotations

import contextlib
import math
import warnings
from contextlib import AbstractContextManager
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, Unpack, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from ringtile.functional.bias import Bias, dense_bias, terms_of
from ringtile.functional.chosen import check_lists, lists_of
from ringtile.functional.merge import merge_attention
from ringtile.functional.tensors import check_plain as check_plain, is_real
from ringtile.index import BlockIndex, build_index
from ringtile.kernels.bias import Term, attend_biased
from ringtile.kernels.chosen import attend_lists
from ringtile.kernels.contracts import Call, RowOptions, SoftmaxOptions, accumulator, options_of, pack_keys, scale_of
from ringtile.kernels.operators import attention, is_unseen
from ringtile.kernels.philox import dropout_threshold
from ringtile.kernels.plans import Structure, found_plan, make_plan, structure_of
from ringtile.kernels.reference import Options as ReferenceOptions, attention_reference
from ringtile.kernels.select import NAMES, is_logged, select, select_biased, select_lists
from ringtile.patterns import Blocks, Causal, Dense, Neighborhood, Pattern, TileGrid
from ringtile.patterns.checks import check_number
from ringtile.patterns.chosen import Split, split
from ringtile.patterns.grammar import as_rule
from ringtile.patterns.neighborhood import in_tiles, token_order
from ringtile.patterns.traced import outside_graphs

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    Given = Pattern | str | BlockMask | Tensor | BlockIndex | None


PatternLike: TypeAlias = "Pattern | str | BlockMask | Tensor"


class Keywords(SoftmaxOptions, total=False):
    """Keyword arguments that all attention functions share, for type checkers."""

    is_causal: bool
    enable_gqa: bool
    backend: str | None


class _Keywords(Keywords, RowOptions, total=False):
    start: int | None
    bias: Bias | tuple[Bias, ...] | None


_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_DENSE, _CAUSAL = Dense(), Causal()
_BLOCK = 128
_NOTHING = contextlib.nullcontext()
_SDPA = F.scaled_dot_product_attention


def check_whole() -> None:
    """Raise ValueError inside PyTorch's `context_parallel`: a rank's tensors look like whole sequences there."""
    # Others replace this function, too. Dynamo compares functions, but does not read their module.
    if F.scaled_dot_product_attention is not _SDPA and "context_parallel" in F.scaled_dot_product_attention.__module__:
        raise ValueError(
            "query: expected all tokens, got those of one rank: inside torch's context_parallel, ringtile's attention "
            "needs attend=ring_attend(mesh, shards_of(n_tokens, mesh)), see ringtile.integrations.torch_shards"
        )


def checked_tensors(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Cast the tensors if autocast is on. Raise ValueError if they do not match."""
    # One argument after the other, so that the first wrong one is named.
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_plain(name, x)
        if x.dim() != 4:
            raise ValueError(f"{name}: expected four dimensions [B, H, N, D], got {x.shape=}")
        if x.device != query.device:
            raise ValueError(f"{name}: expected the query's device, got {x.device=} with {query.device=}")
        if x.is_meta:
            raise ValueError(f"{name}: expected a device that holds data, got {x.device=}")
    query, key, value = _cast(query, key, value)
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dtype not in _DTYPES or x.dtype != query.dtype:
            raise ValueError(f"{name}: expected one of {_DTYPES}, the same for all, got {x.dtype=} with {query.dtype=}")
    (batch, heads, _, head_dim), (key_batch, key_heads, n_keys, key_dim) = query.shape, key.shape
    if heads == 0 or head_dim == 0:
        raise ValueError(f"query: expected at least one head and a head_dim of at least 1, got {query.shape=}")
    if key_batch != batch or key_dim != head_dim:
        raise ValueError(f"key: expected the query's batch and head_dim, got {key.shape=} with {query.shape=}")
    if value.shape[:3] != (key_batch, key_heads, n_keys):
        raise ValueError(f"value: expected the key's batch, heads and length, got {value.shape=} with {key.shape=}")
    if heads != key_heads and not (enable_gqa and key_heads and heads % key_heads == 0):
        wanted = "a divisor of the query's heads" if enable_gqa else "the query's heads (or enable_gqa=True)"
        raise ValueError(f"key: expected {wanted}, got {key.shape=} with {query.shape=}, {enable_gqa=}")
    if torch.compiler.is_compiling():
        # Dynamo does not pass a tensor twice to a function with a derivative of its own.
        value = value.view_as(value) if value is key or value is query else value
        key = key.view_as(key) if key is query else key
    return query, key, value


def _cast(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cast the tensors under autocast, like PyTorch all except float64, so that different dtypes become one."""
    if torch.is_autocast_enabled(query.device.type):
        to = torch.get_autocast_dtype(query.device.type)
        tensors = query, key, value
        query, key, value = (x.to(to) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors)
    return query, key, value


def _check_rows(name: str, x: Tensor, shape: tuple[int, ...], query: Tensor) -> None:
    check_plain(name, x)
    if x.shape != shape or x.device != query.device:
        raise ValueError(f"{name}: expected shape {tuple(shape)} on {query.device}, got {x.shape=} on {x.device}")


def _checked_numbers(name: str, numbers: Tensor | None, count: int, query: Tensor) -> Tensor | None:
    """Return the numbers of heads or batch elements as int64. Raise ValueError if they do not match."""
    if numbers is None:
        return None
    _check_rows(name, numbers, (count,), query)
    if numbers.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name}: expected int32 or int64, got {numbers.dtype=}")
    return numbers.long()


def _check_seed(seed: int | Tensor, query: Tensor) -> None:
    if isinstance(seed, Tensor):
        if seed.numel() != 1 or seed.dtype != torch.int64 or seed.device != query.device:
            raise ValueError(
                f"seed: expected one int64 element on {query.device}, got {seed.shape=}, {seed.dtype=} on {seed.device}"
            )
        check_plain("seed", seed)
    elif isinstance(seed, bool) or not isinstance(seed, int) or not -(2**63) <= seed < 2**63:
        raise ValueError(f"seed: expected a 64-bit integer or one int64 element, got {seed!r}")


def check_options(
    query: Tensor, key: Tensor, *, backend: str | None = None, n_keys: int | None = None, **options: Unpack[RowOptions]
) -> None:
    """Raise ValueError if an option of attention is invalid. ``n_keys`` are those of all ranks. Default: the key's."""
    if backend is not None and backend not in NAMES:
        raise ValueError(f"backend: expected one of {NAMES} or None, got {backend!r}")
    dropout_threshold(options.get("dropout_p", 0.0))
    scale_of(query, options.get("scale"))
    check_number("softcap", options.get("softcap", 0.0), "a finite number >= 0", 0)
    if (key_mask := options.get("key_mask")) is not None:
        _check_rows("key_mask", key_mask, (query.shape[0], key.shape[2]), query)
        if key_mask.dtype != torch.bool:
            raise ValueError(f"key_mask: expected bool, True for keys to attend to, got {key_mask.dtype=}")
    if (seed := options.get("seed")) is not None:
        _check_seed(seed, query)
    if (key_lengths := options.get("key_lengths")) is not None:
        _checked_numbers("key_lengths", key_lengths, query.shape[0], query)
        # On a GPU, or in a graph, reading the values would synchronize or fail.
        may_read, most = key_lengths.device.type == "cpu" and is_real(key_lengths), n_keys or key.shape[2]
        if may_read and not torch.equal(key_lengths, key_lengths.clamp(0, most)):
            raise ValueError(f"key_lengths: expected values in [0, {most}], got {key_lengths.tolist()}")
    for name, per_head in (("alibi_slopes", options.get("alibi_slopes")), ("sinks", options.get("sinks"))):
        if per_head is not None:
            _check_rows(name, per_head, query.shape[1:2], query)
            if not per_head.is_floating_point():
                raise ValueError(f"{name}: expected a floating dtype, got {per_head.dtype=}")


def as_pattern(pattern: PatternLike, start: int | None = None) -> Pattern:
    """Convert a text, a FlexAttention mask or a bool matrix of tiles to a pattern. Raise ValueError for others."""
    if isinstance(pattern, Tensor):
        check_plain("pattern", pattern)
        return Blocks(pattern)
    if isinstance(pattern, Pattern | str):
        return as_rule(pattern)
    from torch.nn.attention.flex_attention import BlockMask

    from ringtile.index.block_lists import from_block_mask

    if not isinstance(pattern, BlockMask):
        return as_rule(pattern, "a Pattern, its text, a BlockMask or a bool matrix of tiles")
    return from_block_mask(pattern, start=start)


def rule_of(pattern: PatternLike | None, is_causal: bool, start: int | None) -> Pattern:
    """Return the rule of a call: its pattern, or all pairs, and the causal rule if it is set."""
    if pattern is None:
        return _CAUSAL if is_causal else _DENSE
    rule = as_pattern(pattern, start)
    return _CAUSAL & rule if is_causal else rule


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Return a context that turns autocast off."""
    autocast = torch.is_autocast_enabled(x.device.type)
    return torch.autocast(x.device.type, enabled=False) if autocast else _NOTHING


def make_call(query: Tensor, *, backend: str | None = None, **options: Unpack[RowOptions]) -> Call:
    """Return a call over no pattern yet, with its seed drawn. It leaves masks, lengths and sinks to the caller."""
    dropout_p = options.get("dropout_p", 0.0)
    head_at = _checked_numbers("head_at", options.get("head_at"), query.shape[1], query)
    batch_at = _checked_numbers("batch_at", options.get("batch_at"), query.shape[0], query)
    return Call(
        start=0,
        block=_BLOCK,
        scale=scale_of(query, options.get("scale")),
        seed=drawn_seed(options.get("seed"), query) if dropout_p else None,
        alibi_slopes=options.get("alibi_slopes"),
        head_at=head_at if dropout_p else None,
        batch_at=batch_at if dropout_p else None,
        dropout_p=dropout_p,
        softcap=options.get("softcap", 0.0),
        backend=backend or "",
    )


def drawn_seed(seed: int | Tensor | None, query: Tensor) -> Tensor:
    """Return the dropout seed as one int64 element. None draws one from PyTorch's generator."""
    if seed is None:
        return torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=query.device)
    return seed if isinstance(seed, Tensor) else torch.tensor([seed], dtype=torch.int64, device=query.device)


def attend_scores(scores: Tensor, pairs: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output and the lse of a few rows from all of their scores ``[B, H, R, N]``, over the kept pairs."""
    # A row without pairs has a maximum of -inf, and -inf - -inf is NaN, so its lse counts as 0 in the difference.
    masked = scores.masked_fill(~pairs, -math.inf)
    lse = masked.logsumexp(3)
    shift = lse.masked_fill(lse == -math.inf, 0)
    return (masked - shift.unsqueeze(3)).exp() @ value, lse


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Scale the output by the keys' share of the softmax denominator, which the sinks add to."""
    empty = lse == -math.inf
    # On a CPU, a number at the end of a tensor can be rounded otherwise than inside a longer one. Float64 hides it, so
    # that slices have the bits of the whole.
    wide = torch.float64 if lse.device.type == "cpu" else lse.dtype
    ahead = sinks.unsqueeze(-1).to(wide) - lse.masked_fill(empty, 0)
    sink_wins = ahead > 0
    # The derivative of a sigmoid is s * (1 - s). Close to 1, the second factor has no digits left.
    less = torch.sigmoid(torch.where(sink_wins, -ahead, ahead))
    share = torch.where(sink_wins, less, 1 - less).masked_fill(empty, 0).to(lse.dtype)
    return (out * share.unsqueeze(-1)).to(out.dtype)


def _name_of(pattern: Given) -> str | int | None:
    """Return the text of a pattern or the number of an index, or None if neither tells the pairs."""
    if isinstance(pattern, BlockIndex):
        return id(pattern)
    if pattern is None:
        # `is_causal`, which makes it causal, is a part of the structure of its own.
        return "dense"
    return pattern.text if isinstance(pattern, Pattern) else None


def check_index(
    name: str, index: BlockIndex, query: Tensor, n_keys: int, is_causal: bool = False, start: int | None = None
) -> None:
    """Raise ValueError if a call does not match the index that it names."""
    (batch, heads, n_queries), (of_batch, of_heads) = query.shape[:3], index.group.shape
    if is_causal:
        raise ValueError("is_causal: not supported with a BlockIndex; build it from Causal() & pattern instead")
    if (index.n_queries, index.n_keys) != (n_queries, n_keys) or start not in (None, index.start):
        at = "" if start is None else f", {start=}"
        got = f"{index.n_queries=}, {index.n_keys=}, {index.start=}"
        raise ValueError(f"{name}: expected an index with {n_queries=}, {n_keys=}{at}, got {got}")
    if of_batch not in (1, batch) or of_heads not in (1, heads):
        raise ValueError(
            f"{name}: expected groups [1 or {batch}, 1 or {heads}] as in {query.shape=}, got {index.group.shape=}"
        )
    if index.device != query.device:
        raise ValueError(f"{name}: expected the query's device {query.device}, got {index.device}")


def _check_start(start: int | None, n_queries: int, n_keys: int) -> None:
    if start is not None and (isinstance(start, bool) or not isinstance(start, int | torch.SymInt)):
        raise ValueError(f"start: expected an integer or None, got {start!r}")
    # In a graph, lengths are symbols, and a check of them would fix the graph to these lengths.
    if isinstance(start, int) and not torch.compiler.is_compiling():
        TileGrid(_BLOCK, start, n_queries, n_keys)  # raises if the positions are too far


def _pairs_of(
    query: Tensor, n_keys: int, pattern: Given, is_causal: bool, start: int | None, backend: str | None
) -> tuple[int, int, str, Pattern | BlockIndex]:
    """Return the first position, the block, the text and the pattern of a call, or the index of one without a text."""
    (batch, heads, n_queries), device = query.shape[:3], query.device
    _check_start(start, n_queries, n_keys)
    if isinstance(pattern, BlockIndex):
        check_index("pattern", pattern, query, n_keys, is_causal, start)
        return pattern.start, pattern.block, "", pattern
    rule = rule_of(pattern, is_causal, start)
    start = n_keys - n_queries if start is None else start
    # The reference evaluates the rule itself, so its memory is all that limits the pattern.
    if rule.text or backend == "reference":
        return start, _BLOCK, rule.text or "", rule
    # Dynamo traces no pattern without a text, so all sizes are numbers here.
    index = build_index(rule, n_queries, n_keys, start=start, num_heads=heads, batch=max(batch, 1), device=device)
    return start, _BLOCK, "", index


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: Given,
    structure: Structure | None,
    is_causal: bool,
    start: int | None,
    enable_gqa: bool,
    backend: str | None,
    bias: Bias | tuple[Bias, ...] | None,
    options: RowOptions,
) -> tuple[Tensor, Tensor]:
    """Check the arguments that no plan of a ``structure`` stands for, and compute attention without sinks."""
    kept: Given = pattern
    plan = None if structure is None else found_plan(structure)
    if plan is None:
        query, key, value = checked_tensors(query, key, value, enable_gqa)
        heads, n = query.shape[1:3]
        # No model has so many heads and so few tokens, but [B, N, H, D] taken for [B, H, N, D] has.
        if not torch.compiler.is_compiling() and 1 < n == key.shape[2] <= 128 and heads > max(256, 8 * n):
            text = f"query: expected [B, H, N, D], got {query.shape=}: {n} tokens of {heads} heads. Is it [B, N, H, D]?"
            warnings.warn(f"{text} Then pass x.transpose(1, 2).", stacklevel=3)
    n_keys, key_mask, key_lengths = key.shape[2], options["key_mask"], options["key_lengths"]
    check_options(query, key, backend=backend, **options)
    # Biases, ALiBi and dropout count positions. The reference moves nothing, so that it can judge the move.
    by_rule = bias is None and options["alibi_slopes"] is None and not options["dropout_p"]
    if isinstance(pattern, Neighborhood) and not is_causal and start is None and by_rule and backend != "reference":
        # Dynamo reads no property of a pattern that a text gave it as a constant.
        tiled = in_tiles(pattern.size, pattern.window, pattern.dilation, pattern.stride, pattern.causal)
        if pattern.tile is None and tiled.tile and query.shape[2] == n_keys == math.prod(pattern.size):
            more: Any = {"enable_gqa": enable_gqa, "backend": backend, **options}
            return _attend_in_tiles(query, key, value, pattern=tiled, **more)
    call = make_call(query, backend=backend, **options)
    # A pattern with a text has no lists.
    if isinstance(pattern, Pattern) and pattern.text is None and (found := split(rule_of(pattern, is_causal, start))):
        if bias is not None:
            raise ValueError("bias: not supported with Chosen lists")
        return _attend_chosen(query, key, value, found, start, enable_gqa, call, options)
    if plan is None:
        first, block, text, kept = _pairs_of(query, n_keys, pattern, is_causal, start, backend)
    else:
        # The structure of the call has the same shapes, rule and start, so these checks have passed.
        first, block, text = plan.call.start, plan.call.block, plan.call.pattern
    call = call._replace(start=first, block=block, pattern=text, key_lengths=key_lengths)
    # A pattern with a text needs no index here: a backend may compute all pairs without one.
    index = kept if isinstance(kept, BlockIndex) else None
    terms = None if bias is None else terms_of(bias, query, key, call, index)
    if backend == "reference":
        assert isinstance(kept, Pattern | BlockIndex)
        return _by_reference(query, key, value, kept, key_mask, call, terms)
    tiles, bits = () if index is None else index.tensors(), None if key_mask is None else pack_keys(key_mask)
    call = call._replace(tiles=tiles, key_bits=bits)
    with without_autocast(query):
        if terms is not None:
            call = call._replace(backend=select_biased(query, key, value, call))
            return attend_biased(query, key, value, terms, call)
        if plan is None or plan.prepared is None:
            call = call._replace(backend=select(query, key, value, call))
        else:
            call = call._replace(backend=plan.call.backend)
        if plan is None and structure is not None:
            if index is not None and index is not pattern:
                # In a tuple, because a call that gives this index itself has other checks.
                structure = ((id(index),), *structure[1:])
            plan = found_plan(structure) or make_plan(structure, query, key, value, call, index, backend or "")
        # Options can be tensors that only PyTorch's dispatcher reads, as lazily zero ones.
        prepared = plan.prepared if plan is not None and is_unseen(*options_of(call)) else None
        return attention(query, key, value, call, prepared)


def _needs_index(pattern: Given, backend: str | None) -> bool:
    """Return True if a call reads its pairs from an index that is built of values."""
    if isinstance(pattern, Pattern):
        return pattern.text is None and backend != "reference" and split(pattern) is None
    return not isinstance(pattern, BlockIndex | None)


@outside_graphs
def _attend_outside(*arguments: Any) -> tuple[Tensor, Tensor]:
    return _attend(*arguments)


def _attend_in_tiles(*tensors: Tensor, pattern: Neighborhood, sinks: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """Move tokens to the order of compact tiles, compute attention there without sinks, and move the results back."""
    # Dynamo calls no method of a pattern that a function gave it as a constant.
    order = token_order(pattern.size, pattern.dilation, pattern.tile).to(tensors[0].device)
    mask, lengths = options["key_mask"], options.pop("key_lengths")
    if mask is not None:
        mask = mask.index_select(1, order)
    if lengths is not None:
        inside = order < lengths.unsqueeze(1)
        mask = inside if mask is None else mask & inside
    options["key_mask"] = mask
    q, k, v = (x.index_select(2, order) for x in tensors)
    found = sparse_attention(q, k, v, pattern, return_lse=True, **options)
    back = torch.zeros_like(order).scatter(0, order, torch.arange(len(order), device=order.device))
    return found[0].index_select(2, back), found[1].index_select(2, back)


def _attend_chosen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    found: Split,
    start: int | None,
    enable_gqa: bool,
    call: Call,
    options: RowOptions,
) -> tuple[Tensor, Tensor]:
    """Compute attention over lists of keys, and over the pairs beside them by tiles. Merge both."""
    (heads, n_queries), n_keys = query.shape[1:3], key.shape[2]
    _check_start(start, n_queries, n_keys)
    first, masks = n_keys - n_queries if start is None else start, (options["key_mask"], options["key_lengths"])
    check_lists(found, query, key, first, n_keys)
    call, named = call._replace(start=first), call.backend or None
    if named == "reference":
        call = call._replace(key_lengths=masks[1])
        return _by_reference(query, key, value, found.rule(first, heads), masks[0], call)
    wide = accumulator(query)
    if found.rest is not None and query.dtype != wide:
        # Each part would be rounded before they are merged, and its gradients before they are added.
        q, k, v = (x.to(wide) for x in (query, key, value))
        out, lse = _attend_chosen(q, k, v, found, start, enable_gqa, call, options)
        return out.to(query.dtype), lse
    with without_autocast(query):
        at = torch.arange(n_queries, device=query.device) + first
        lists = lists_of(found, query, key, at, *masks)
        call = call._replace(backend=select_lists(query, key, value, lists, call))
        part = attend_lists(query, key, value, lists, call)
        if found.rest is None:
            return part
        # Both draw the same dropout.
        options = {**options, "seed": call.seed}
        other = _attend(query, key, value, found.rest, None, False, start, enable_gqa, named, None, options)
        out, lse = merge_attention(*zip(part, other, strict=True))
        return out, lse


def _by_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kept: Pattern | BlockIndex,
    key_mask: Tensor | None,
    call: Call,
    terms: list[Term] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the results of the reference in the dtypes of the other backends."""
    shared: Any = {name: getattr(call, name) for name in ReferenceOptions.__annotations__ if name in Call._fields}
    if terms is not None:
        shared["bias"] = dense_bias(terms, query.shape[2], key.shape[2], call.start, call.scale)
    out, lse = attention_reference(query, key, value, kept, key_mask=key_mask, **shared)
    return out.to(query.dtype), lse if query.dtype == torch.float64 else lse.float()


@overload
def sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: PatternLike | BlockIndex | None = None,
    *,
    return_lse: Literal[False] = False,
    **keywords: Unpack[_Keywords],
) -> Tensor: ...


@overload
def sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: PatternLike | BlockIndex | None = None,
    *,
    return_lse: Literal[True],
    **keywords: Unpack[_Keywords],
) -> tuple[Tensor, Tensor]: ...


@overload
def sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: PatternLike | BlockIndex | None = None,
    *,
    return_lse: bool,
    **keywords: Unpack[_Keywords],
) -> Tensor | tuple[Tensor, Tensor]: ...


def sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: PatternLike | BlockIndex | None = None,
    *,
    is_causal: bool = False,
    key_mask: Tensor | None = None,
    key_lengths: Tensor | None = None,
    start: int | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    head_at: Tensor | None = None,
    batch_at: Tensor | None = None,
    bias: Bias | tuple[Bias, ...] | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute scaled dot product attention over the pairs that a pattern keeps, exactly, forward and backward.

    Use it like `torch.nn.functional.scaled_dot_product_attention`. The result equals
    ``softmax(query @ key.mT * scale + mask) @ value``, with a mask of 0 for kept pairs and -inf for all others, but
    the mask is never built: time and memory follow the number of kept tiles.

    Two things differ from a plain masked softmax:

    * ``is_causal`` aligns the last query with the last key (lower right). PyTorch aligns the first with the first.
    * A query that keeps no keys returns 0, an lse of -inf and zero gradients.

    Args:
        query: ``[B, H, Nq, D]`` in float64, float32, bfloat16 or float16, with any strides. Under autocast, all three
            tensors are cast first, except float64.
        key: ``[B, Hkv, Nk, D]`` in the same dtype. Hkv must equal H, or divide it if ``enable_gqa`` is set.
        value: ``[B, Hkv, Nk, Dv]`` in the same dtype.
        pattern: Which pairs to keep: a `ringtile.patterns.Pattern`, its text (`ringtile.patterns.parse`), a
            `BlockIndex`, a FlexAttention `BlockMask`, or a bool matrix of 128 x 128 tiles, ``[rows, columns]`` or
            ``[H, rows, columns]``. Default: all pairs.
        is_causal: Keep only keys at or before the query's position. Not available with a `BlockIndex`.
        key_mask: ``[B, Nk]`` bool, True for keys that queries may attend to.
        key_lengths: ``[B]`` integers in [0, Nk], the number of valid keys of each batch element. They are checked only
            on a CPU outside compiled graphs, since a check synchronizes. Other values count as the nearest valid one.
        start: Position of the first query. Default: ``Nk - Nq``.
        dropout_p: Probability of dropping a weight after the softmax. The dropout mask depends only on the seed, the
            positions, and the numbers of the head and the batch element.
        seed: Dropout seed, as an int or a tensor with one int64 element. Default: drawn from PyTorch's generator.
        scale: Factor for the scores. Default: ``D ** -0.5``.
        softcap: If positive, scores become ``softcap * tanh(scores / softcap)``. Default: 0, no cap.
        alibi_slopes: ``[H]``. Subtracts ``slope * |i - j|`` from the score of positions i and j. Gets no gradient.
        sinks: ``[H]``, one extra logit in the softmax denominator of each row. The returned lse does not include it.
        head_at: ``[H]`` integers, the numbers of the heads in the whole problem, if the call holds some of its heads.
            Dropout depends on them. Default: 0, 1, ...
        batch_at: ``[B]`` integers, the same for the batch elements.
        bias: What to add to the scores: a `Relative`, `Grid`, `ByQuery` or `ByKey`, or a tuple of them for their sum.
            Their tensors get gradients, without second derivatives. Not available with ``softcap``, ``alibi_slopes``
            and lists (`ringtile.patterns.Chosen`). "native", "blockwise" and "reference" compute it.
        enable_gqa: Let H / Hkv query heads share each key head.
        return_lse: Also return the log-sum-exp (natural log).
        backend: "native" (CPU), "triton", "flash" or "fa4" (GPU), "dense", "blockwise" or "reference". Default: the
            first one that supports the call, never "flash" or "fa4". A backend that you name never falls back. Lists
            (`ringtile.patterns.Chosen`) have "native", "blockwise" and "reference".

    Returns:
        The output ``[B, H, Nq, Dv]``. With ``return_lse``, also the lse ``[B, H, Nq]`` in float32 (float64 for float64
        inputs). Both are differentiable. For bfloat16 and float16, the lse of "dense" and "blockwise" on a CPU is
        PyTorch's own, which is off by up to 1e-4. That of "native" is off by 1e-6.

    Raises:
        ValueError: If shapes, dtypes, devices or values are invalid, or if the named backend does not support the call.
            Lists are read on a CPU outside compiled graphs. Elsewhere, a key that does not exist counts as none.

    Example:
        >>> from ringtile.patterns import Causal, GlobalTokens, Window
        >>> q, k, v = torch.randn(3, 1, 4, 1000, 64).unbind()
        >>> sparse_attention(q, k, v, Causal() & (Window(256) | GlobalTokens(16))).shape
        torch.Size([1, 4, 1000, 64])
    """
    if isinstance(pattern, str):
        pattern = as_rule(pattern)
    if not isinstance(pattern, BlockIndex):
        check_whole()
    structure = plan = None
    if bias is None and is_unseen(query, key, value) and not is_logged():
        query, key, value = _cast(query, key, value)
        has = bool(enable_gqa), is_causal, dropout_p != 0.0, key_mask is None, key_lengths is None, alibi_slopes is None
        # Values of other types can be equal to valid ones: True == 1. So are two zeros, but -0.0 has other gradients.
        types = type(start) in (int, NoneType), type(scale) in (float, int, NoneType), type(backend) in (str, NoneType)
        numbers = type(softcap) in (float, int) and type(dropout_p) in (float, int)
        if all(types) and numbers and scale != 0:
            structure = structure_of(_name_of(pattern), query, key, value, start, scale, softcap, backend, has)
            plan = found_plan(structure)
    # One chain of comparisons costs less than seven.
    plain = key_mask is key_lengths is alibi_slopes is sinks is seed is head_at is batch_at is None
    if plan is not None and plain and dropout_p == 0.0:
        # No argument is left to check, because each of them is a part of the structure.
        call = plan.call
        if isinstance(pattern, BlockIndex):
            call = call._replace(tiles=pattern.tensors())
        with without_autocast(query):
            if plan.prepared is None:
                call = call._replace(backend=select(query, key, value, call))
            out, lse = attention(query, key, value, call, plan.prepared)
    else:
        options: RowOptions = {
            "key_mask": key_mask,
            "key_lengths": key_lengths,
            "dropout_p": dropout_p,
            "seed": seed,
            "scale": scale,
            "softcap": softcap,
            "alibi_slopes": alibi_slopes,
            "sinks": sinks,
            "head_at": head_at,
            "batch_at": batch_at,
        }
        outside = torch.compiler.is_dynamo_compiling() and _needs_index(pattern, backend)
        compute = _attend_outside if outside else _attend
        out, lse = compute(query, key, value, pattern, structure, is_causal, start, enable_gqa, backend, bias, options)
    if sinks is not None:
        out = with_sinks(out, lse, sinks)
    return (out, lse) if return_lse else out
