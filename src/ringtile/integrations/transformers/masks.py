"""Masks of transformers as patterns: the rule is read, and the mask of all pairs is not built.

transformers describes a mask by a function of positions and calls a registered function (here `pattern_mask`) to make a
mask of it. The result travels through the model to the attention function. It must be a four-dimensional tensor, so it
is one without memory, a `PatternMask`, that carries the kept pairs.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial, reduce
from operator import and_, or_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ringtile.integrations.transformers.door import is_known, refuse_arguments
from ringtile.patterns import Causal, Chosen, Dense, Documents, Pattern, Segments, Window, from_mask
from ringtile.patterns.base import And
from ringtile.patterns.checks import LARGEST
from ringtile.patterns.facts import keeps_self, moves_along, sees_no_future
from ringtile.patterns.mask import read_once
from ringtile.patterns.private import call
from ringtile.patterns.traced import constant

MaskFunction = Callable[..., Any]

DROPPED = -1e4
"""A float mask drops pairs by this value or less: the smallest of its dtype, -inf, or -1e4 in older models."""


class KeptPairs(NamedTuple):
    """The pairs that the mask of a model keeps."""

    pattern: Pattern
    """The rule. Key 0 of the call is at position 0."""
    start: int = 0
    """Position of query 0 in the rule."""
    key_mask: Tensor | None = None
    """``[B, Nk]`` bool, True for keys to attend to, or ``[B, 1 or H, Nk]`` for a single query."""
    offset: int | Tensor = 0
    """Position of query 0 minus that of key 0 in the sequence. It can differ from ``start`` if a mask was given."""
    first: int = 0
    """Position of key 0 in the sequence: a sliding cache has dropped the keys before it."""
    leading: tuple[int, ...] | None = None
    """Number of padding tokens before the first real one, per batch element. None if there are none."""
    real: Tensor | None = None
    """``[B, N]`` bool, False for padding, from position 0 on: of a mask made in a graph, which cannot count it."""
    documents: Documents | None = None
    """The packed documents, which ``pattern`` keeps apart. A pattern of yours begins anew in each."""
    is_packed: bool = False
    """True if the model keeps packed documents apart and ``pattern`` does not, because it was read on a shard."""


def pairs(
    pattern: Pattern, start: int | Tensor, n_queries: int, n_keys: int, device: torch.device, heads: int = 1
) -> Tensor:
    """Return the kept pairs as bool ``[B or 1, heads, Nq, Nk]``."""
    head = torch.arange(heads, device=device)[:, None, None]
    query = (torch.arange(n_queries, device=device) + start)[:, None]
    key = torch.arange(n_keys, device=device)
    rows = [pattern] if pattern.batch_size is None else [pattern.batch_row(b) for b in range(pattern.batch_size)]
    return torch.stack([row.allowed(head, query, key) for row in rows])


class PatternMask(Tensor):
    """A mask ``[B, 1, Nq, Nk]`` that carries its kept pairs instead of one bool per pair.

    It has no values. Models whose attention is written by hand compute with their mask, and get an error.
    """

    kept: KeptPairs

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Whatever is not known to leave the pairs alone raises below, so a model cannot compute with values by mistake.
        name = getattr(func, "__name__", "")
        if name in ("contiguous", "detach", "bool"):
            return args[0]
        if name in ("cat", "pad", "__and__") and (joined := _joined_masks(name, args)) is not None:
            return joined
        if name == "__getitem__" and (cut := _cut(*args)) is not None:
            return cut
        if name == "__getitem__" and _is_row_of_heads(*args):
            # An indexer has one mask for all heads.
            of_all_heads: PatternMask = super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
            of_all_heads.kept = args[0].kept
            return of_all_heads
        if name == "__invert__" and args[0].dim() == 3:
            # It also has the scores of all pairs. `use_ringtile` replaces both.
            mask, kept = args[0], args[0].kept
            keep = pairs(kept.pattern, kept.start, mask.shape[1], mask.shape[2], mask.device)[:, 0]
            return ~keep if kept.key_mask is None else ~(keep & kept.key_mask[:, None])
        if name == "__set__" and args[1] is False:
            # Checkpoints that recompute a layer set requires_grad.
            return None
        if name == "to":
            mask, kept = args[0], args[0].kept
            moved_as: Any = super().__torch_function__
            like = moved_as(func, types, (torch.empty(0, dtype=torch.bool, device=mask.device), *args[1:]), kwargs)
            if like.dtype == torch.bool and like.device == mask.device:
                return mask
            if like.dtype == torch.bool:
                moved = {part: x.to(like.device) for part, x in kept._asdict().items() if isinstance(x, Tensor)}
                return carrier(kept._replace(**moved), mask.shape[0], mask.shape[2], mask.shape[3], like.device)
        about = name in _ABOUT or name.startswith("is_") or (name.startswith("_") and not name.startswith("__"))
        # An attribute is read by the getter of its descriptor, whose name is always "__get__".
        if name == "__get__":
            about = func.__self__.__name__ not in _VALUES
        if about:
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        raise ValueError(
            "attention_mask: expected a model that hands its mask to transformers' attention interface, got one that "
            f"computes with it ({name}); use attn_implementation='eager'"
        )


_VALUES = {"T", "mT", "H", "mH", "data", "real", "imag"}
"""Attributes that are tensors with its values."""
_ABOUT = {*"size dim stride storage_offset untyped_storage numel element_size __len__ __hash__".split()}
"""Methods that return facts about a tensor, and not its values."""


def _cut(mask: PatternMask, index: Any) -> Tensor | None:
    """Return the mask of consecutive queries and all keys, or None if the index asks for anything else."""
    index = index if isinstance(index, tuple) else (index,)
    in_steps = all(isinstance(each, slice) and each.step in (None, 1) for each in index)
    if _is_exporting() or not in_steps or len(index) > 4:
        return None
    # mask[:, :, 30:60] keeps batch, heads and keys whole and cuts the queries. Any other cut is refused by the caller.
    bounds = [each.indices(size)[:2] for each, size in zip(index, mask.shape, strict=False)]
    whole = [(0, size) for size in mask.shape]
    first, end = bounds[2] if len(bounds) > 2 else whole[2]
    if bounds[:2] != whole[: len(bounds[:2])] or bounds[3:] != whole[3 : len(bounds)] or first >= end:
        return None
    if (first, end) == whole[2]:
        return mask
    kept = mask.kept._replace(start=mask.kept.start + first, offset=mask.kept.offset + first)
    return carrier(kept, mask.shape[0], end - first, mask.shape[3], mask.device)


def _joined_masks(name: str, args: Sequence[Any]) -> Tensor | None:
    """Return a mask with the keys that another chose: of the same keys (``&``), or of more, which come after them."""
    masks = args[0] if name == "cat" else args
    if len(masks) != 2 or not isinstance(masks[0], PatternMask):
        return None
    mask, more = masks
    if name == "__and__" and more is mask:
        return masks[0]
    listed = more.kept.pattern if isinstance(more, PatternMask) else None
    kept, (batch, _, n_queries, n_keys), device = mask.kept, mask.shape, mask.device
    if name == "__and__" and isinstance(listed, Chosen):
        return carrier(kept._replace(pattern=kept.pattern & listed), batch, n_queries, n_keys, device)
    if name == "cat" and isinstance(listed, Chosen):
        indices, n_more = listed.indices, more.shape[-1]
    elif name == "pad" and n_queries == 1 and more[0] == 0:
        # One query, which sees all.
        n_more = more[1]
        indices = torch.arange(n_more, device=device).view(1, 1, 1, n_more)
    else:
        return None
    if not sees_no_future(kept.pattern):
        raise ValueError(f"attention_mask: expected a causal rule before compressed keys, got {kept.pattern!r}")
    # No query is after them, so a causal rule leaves them out.
    rule = _with_more_keys(kept.pattern, n_keys + n_more) | Chosen(torch.where(indices < 0, -1, indices + n_keys))
    key_mask = None if kept.key_mask is None else pad(kept.key_mask, (0, n_more), value=True)
    return carrier(kept._replace(pattern=rule, key_mask=key_mask), batch, n_queries, n_keys + n_more, device)


def _with_more_keys(rule: Pattern, n_keys: int) -> Pattern:
    """Return a rule for more keys. They are no document of a query."""
    match rule:
        case And(first=first, second=second):
            return _with_more_keys(first, n_keys) & _with_more_keys(second, n_keys)
        case Documents(bounds=bounds, batched=batched):
            ends = bounds.tensor[:, 1:].contiguous()
            ids = torch.searchsorted(ends, torch.arange(n_keys, device=ends.device).repeat(len(ends), 1), right=True)
            return Documents(ids=ids if batched else ids[0])
    return rule


def _is_row_of_heads(mask: PatternMask, index: Any) -> bool:
    """Return True for ``mask[:, 0]`` of a mask with four dimensions, whatever whole slices follow."""
    whole = isinstance(index, tuple) and all(each == slice(None) for each in (*index[:1], *index[2:]))
    return whole and mask.dim() == 4 and type(index[1]) is int and index[1] == 0


def carrier(kept: KeptPairs, batch: int, n_queries: int, n_keys: int, device: torch.device | str) -> Tensor:
    """Return the kept pairs as a mask that transformers hands through to the attention function."""
    if _is_exporting():
        # Tensors are fake there, and none of them can carry anything.
        mask: PatternMask = call("torch:Tensor._make_subclass", "torch.export", PatternMask, PatternMask, _NO_MASK)
    else:
        # In a graph, a mask that has lost its pairs must not look like a mask.
        size = 0 if torch.compiler.is_compiling() else n_keys
        empty = torch.zeros((), dtype=torch.bool, device=device).expand(batch, 1, n_queries, size)
        mask = empty.as_subclass(PatternMask)
    mask.kept = kept
    return mask


_NO_MASK = torch.zeros(1, 1, 1, 0, dtype=torch.bool, device="cpu")


def _is_exporting() -> bool:
    """Return True in ``torch.export`` that runs the model as Python, which is its default."""
    return torch.compiler.is_compiling() and not torch.compiler.is_dynamo_compiling()


def _read(function: MaskFunction) -> tuple[str, dict[str, Any]]:
    """Return the name of a mask function that is known, or an empty text, and what its closure holds."""
    module, name = function.__module__, function.__qualname__.partition(".")[0]
    of_gemma = (module, name) == ("transformers.models.gemma3.modeling_gemma3", "Gemma3TextModel")
    # A function of a model's own file may have a known name and another meaning.
    if not of_gemma and not (module.startswith("transformers.") and is_known(module, name)):
        return "", {}
    # The only place where the window or the padding of a mask function is written.
    cells = function.__closure__ or ()
    return name, dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in cells), strict=True))


def read_rule(function: MaskFunction, first: int, n_keys: int | None, *, on_shard: bool = False) -> Pattern | None:
    """Return the pattern of a mask function, whose key 0 is at position ``first``, or None if it is not known.

    Documents, chunks and groups follow from the tokens of the call. In a graph, without ``n_keys``, they are not known.
    On a shard of a sequence they mean nothing: documents are left out, and groups are not known.
    """
    name, values = _read(function)
    here = slice(first, first + (n_keys or 0))
    read = partial(read_rule, first=first, n_keys=n_keys, on_shard=on_shard)
    match name:
        case "causal_mask_function":
            return Causal()
        case "bidirectional_mask_function" | "Gemma3TextModel":
            # The second makes EmbeddingGemma's layers bidirectional, and has no other name.
            return Dense()
        case "_bidirectional_window_overlay":
            return Window(values["sliding_window"] - 1)
        case "and_masks":
            return _joined(and_, [read(each) for each in values["mask_functions"]])
        case "or_masks":
            parts = [read(each) for each in values["mask_functions"]]
            if not on_shard and n_keys is not None and any(part is not None and keeps_self(part) for part in parts):
                groups = [_groups(each, here) for each in values["mask_functions"]]
                parts = [group if part is None else part for part, group in zip(parts, groups, strict=True)]
            return _joined(or_, parts)
        case "sliding_window_overlay" if values["sliding_window"] > 0:
            # Their window counts the query's own key, ours the keys before it.
            return Window(values["sliding_window"] - 1, LARGEST)
        case "sliding_window_bidirectional_overlay":
            return Window(values["sliding_window"])
        case "chunked_overlay" if n_keys is not None:
            return _chunks(values["chunk_size"], values["left_padding"], first, n_keys)
        case "packed_sequence_mask_function" if on_shard:
            return Dense()
        case "packed_sequence_mask_function" if n_keys is not None:
            documents = _documents(values["packed_sequence_mask"][:, here])
            return Dense() if documents is None else documents
        case "remap_positions_for_packed_sequence":
            rule = read_rule(values["mask_function"], 0, n_keys, on_shard=on_shard)
            # Positions rise by one inside a document, so a rule of distances does not change.
            return rule if on_shard or (rule is not None and moves_along(rule)) else None
    return None


def _documents(ids: Tensor) -> Documents | None:
    return Documents(ids=ids) if bool((ids != ids[:, :1]).any()) else None


def packed_ids(function: MaskFunction) -> Tensor | None:
    """Return the document of each token ``[B, N]``, if a mask function keeps packed documents apart."""
    name, values = _read(function)
    if name == "packed_sequence_mask_function":
        ids: Tensor = values["packed_sequence_mask"]
        return ids
    parts = values["mask_functions"] if name == "and_masks" else ()
    return next((ids for ids in map(packed_ids, parts) if ids is not None), None)


def chunks_begin_at_documents() -> bool:
    """Return True if this transformers counts the positions of packed rows from the begin of each document."""
    from transformers import masking_utils

    return hasattr(masking_utils, "remap_positions_for_packed_sequence")


def _joined(join: Callable[[Pattern, Pattern], Pattern], parts: list[Pattern | None]) -> Pattern | None:
    known = [part for part in parts if part is not None]
    if len(known) < len(parts) or not known:
        return None
    if join is or_ and Dense() in known:
        return Dense()
    if join is and_ and Causal() in known:
        # The causal rule bounds the right side of a window anyway.
        known = [Window(part.left) if isinstance(part, Window) and part.right == LARGEST else part for part in known]
        known.sort(key=lambda part: part != Causal())
    if join is and_ and len(known) > 1:
        known = [part for part in known if part != Dense()] or known[:1]
    return reduce(join, known)


def _groups(function: MaskFunction, here: slice) -> Pattern | None:
    """Return the rule of tokens, such as those of an image, that all attend to their group, and each to itself."""
    name, values = _read(function)
    if name != "blockwise_overlay":
        return None
    ids = values["block_sequence_ids"][:, here].long()
    # Tokens outside groups have -1. Each gets a negative number of its own, (-2, -3, ...), and sees itself alone.
    alone = -2 - torch.arange(ids.shape[1], device=ids.device)
    try:
        return Documents(ids=torch.where(ids < 0, alone, ids))
    except ValueError:
        # A group whose tokens are apart.
        return None


def _chunks(size: int, left_padding: Tensor, first: int, n_keys: int) -> Pattern:
    """Return the rule of chunks that begin at the first real token of each batch element."""
    if first % size == 0 and not bool(left_padding.any()):
        return Segments(size)
    # With chunks of 4 and 2 tokens of padding, tokens 2 to 5 are chunk 0 and 6 to 9 chunk 1. The padding is chunk -1.
    position = torch.arange(first, first + n_keys, device=left_padding.device)
    return Documents(ids=(position - left_padding[:, None]) // size)


@constant
def _constant_rule(function: MaskFunction, first: int) -> Pattern:
    """Read a rule while a graph is traced, in which closures cannot be read."""
    rule = read_rule(function, first, None)
    if rule is None or rule.text is None:
        raise ValueError(
            "attention mask: torch.compile and torch.export support causal and sliding rules, got another one; if it "
            "is that of packed rows, pass attention_mask"
        )
    return rule


CHOSEN = "use_ringtile"
"""The implementation of all models that `use_ringtile` switched. Their modules keep what it chose."""
_COMPUTED = {"deepseek_v4", "qwen4_exp_text"}
"""Models that compute with their mask and hand over the result, of all pairs, unless `use_ringtile` changed them."""
_EAGER = {"bigbird_pegasus", "gemma4_audio", "lightglue", "nllb-moe", "t5gemma2_decoder"}
"""Models that compute with the values of their mask: they route, reorder, cut or join it, or attend by hand."""


_OF_MASKS = set(
    "allow_is_bidirectional_skip allow_is_causal_skip batch_size config device dtype kv_length kv_offset local_size "
    "mask_function q_length q_offset use_vmap".split()
)
"""Arguments of functions that make masks. Those that `pattern_mask` does not read change no mask."""


def is_streamed(config: Any) -> bool:
    """Return True if the parts of a model that choose keys do so without the scores and masks of all pairs."""
    return bool(config._attn_implementation == CHOSEN)


def pattern_mask(*, attention_mask: Tensor | None = None, **options: Any) -> Tensor:
    """Return the mask of a mask function, as transformers' mask interface asks for it.

    A rule that is not known is evaluated, and its bool mask becomes a pattern.
    """
    refuse_arguments(options, *_OF_MASKS)
    config: Any = options.get("config")
    kind = getattr(config, "model_type", None)
    is_computed = kind in _COMPUTED
    is_head = kind == "siglip2_vision_model" and options["q_length"] == 1
    if kind in _EAGER or is_head or (is_computed and not is_streamed(config)):
        from transformers.masking_utils import eager_mask

        mask: Tensor = eager_mask(attention_mask=attention_mask, **options)
        return mask
    if torch.compiler.is_compiling():
        # In a graph, transformers prepares for packed rows unless it may skip a causal mask. Bidirectional masks have
        # no packed rows. Chunks begin at tensors.
        is_causal = "allow_is_bidirectional_skip" not in options and not options.get("allow_is_causal_skip", True)
        may_be_packed = is_causal and attention_mask is None and options["q_length"] != 1
        chunk = getattr(options.get("config"), "attention_chunk_size", None)
        if is_computed or may_be_packed or (chunk is not None and options.get("local_size") == chunk):
            found: Tensor = _outside_graphs(attention_mask=attention_mask, **options)
            return found
    return _pattern_mask(attention_mask=attention_mask, **options)


def _pattern_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor | None = None,
    kv_offset: int = 0,
    mask_function: MaskFunction | None = None,
    attention_mask: Tensor | None = None,
    *,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **options: Any,
) -> Tensor:
    from transformers.masking_utils import causal_mask_function, prepare_padding_mask, sdpa_mask

    if attention_mask is not None and attention_mask.dim() != 2:
        raise ValueError(
            f"attention_mask: expected [{batch_size}, N] of the tokens, or [{batch_size}, 1 or H, Nq, Nk] of all "
            f"pairs, got {attention_mask.shape=}"
        )
    if q_offset is None and q_length != kv_length:
        raise ValueError(f"q_offset: expected the position of the first query, got None with {q_length=}, {kv_length=}")
    q_offset = 0 if q_offset is None else q_offset
    if mask_function is None:
        mask_function = causal_mask_function
    padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    tracing = torch.compiler.is_compiling()
    if not tracing and attention_mask is not None and attention_mask.shape[1] > kv_offset + kv_length:
        raise ValueError(
            f"attention_mask: expected at most {kv_offset + kv_length} tokens, as many as keys, got "
            f"{attention_mask.shape=}"
        )
    leading = None
    if padding is not None and not tracing:
        if padding.all():
            padding = None
        elif bool((~padding[:, 0]).any()):
            leading = tuple(padding.long().argmax(1).tolist())
    # A sliding cache has dropped keys: its key 0 is token kv_offset, and so is the first column of the mask.
    key_mask = None if padding is None else padding[:, kv_offset : kv_offset + kv_length].bool()
    offset = q_offset - kv_offset
    rule = _constant_rule(mask_function, kv_offset) if tracing else read_rule(mask_function, kv_offset, kv_length)
    start, ids = 0, None if tracing else packed_ids(mask_function)
    documents = None if ids is None else _documents(ids[:, kv_offset : kv_offset + kv_length])
    if rule is None:
        found = sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            allow_is_causal_skip=False,
            use_vmap=use_vmap,
            device=device,
        )
        rule, start = from_mask(found), kv_length - q_length
    elif q_length == 1 and (isinstance(offset, Tensor) or rule.text is None):
        # One query has a mask of keys, and needs no index.
        row = pairs(rule, offset, 1, kv_length, torch.device(device))[:, 0, 0]
        key_mask = row.expand(batch_size, kv_length) if key_mask is None else row & key_mask
        rule = Dense()
    else:
        start = offset = int(offset)
    kept = KeptPairs(rule, start, key_mask, offset, kv_offset, leading, padding if tracing else None, documents)
    return carrier(kept, batch_size, q_length, kv_length, device)


_outside_graphs = torch.compiler.disable(
    _pattern_mask,
    reason="packed rows are read outside graphs: pass attention_mask, or leave the cache on. Chunks are, too.",
)


def kept_by_mask(mask: Tensor, query: Tensor, n_keys: int) -> KeptPairs:
    """Return the pairs that a mask of a model or its caller keeps: bool, or float with very small values."""
    batch, heads, n_queries, _ = query.shape
    allowed = ({1, batch}, {1, heads}, {1, n_queries}, {n_keys})
    if mask.dim() != 4 or any(size not in sizes for size, sizes in zip(mask.shape, allowed, strict=True)):
        raise ValueError(
            f"attention_mask: expected [{batch}, 1 or {heads}, {n_queries}, {n_keys}] of all pairs in the model's "
            f"attention, got {mask.shape=}; register masks and attention together, by "
            "ringtile.integrations.transformers.register"
        )
    return read_once(mask, _kept_by_mask, n_queries, n_keys)


def _kept_by_mask(mask: Tensor, n_queries: int, n_keys: int) -> KeptPairs:
    keep = mask
    if mask.dtype != torch.bool:
        dropped = mask <= DROPPED
        keep = ~dropped
        # A number that all kept pairs in a row share changes no softmax.
        same = (mask == mask.amax(-1, keepdim=True)) & (mask < math.inf)
        if not mask.is_floating_point() or not bool((dropped | same).all()):
            raise ValueError(
                "attention_mask: expected bool, or a float mask of one number per row, such as 0, and values of -1e4 "
                f"or less, got other values in {mask.dtype}; a bias on the scores is not supported"
            )
    start = n_keys - n_queries
    if n_queries == 1 and keep.shape[1] == 1:
        # What is remembered must not keep the mask.
        return KeptPairs(Dense(), start, keep[:, 0, 0].clone(), start)
    return KeptPairs(from_mask(keep.expand(-1, -1, n_queries, -1)), start, None, start)
