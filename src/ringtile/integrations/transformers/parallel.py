"""Context parallelism of transformers models: the ranks of a group share each row, and attention is exact.

The mask function carries a layer's rule only: lengths and positions that reach it are those of a shard. The facts of
the batch (length, documents, padding) travel as one keyword argument, which transformers hands to every attention call.
So nothing is global, and a checkpoint can recompute a layer later and in another thread.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Union

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ringtile.distributed import Layout, make_plan, ring_attention
from ringtile.distributed.layout import LAYOUTS
from ringtile.distributed.plan import fits_ring
from ringtile.distributed.process_groups import real_group
from ringtile.distributed.transports import group_of
from ringtile.integrations.transformers.attention import (
    SOFTMAX,
    GivenPattern,
    from_first,
    pattern_of_layer,
    read_pattern,
    softmax_of,
)
from ringtile.integrations.transformers.door import refuse_arguments
from ringtile.integrations.transformers.masks import (
    KeptPairs,
    PatternMask,
    carrier,
    chunks_begin_at_documents,
    packed_ids,
    read_rule,
)
from ringtile.integrations.transformers.registry import register_pair, switch
from ringtile.patterns import Documents, Pattern, Segments
from ringtile.patterns.base import And
from ringtile.patterns.content import digest_of

NAME = "ringtile_cp"

Layouts = Union[Literal["zigzag", "contiguous", "striped"], Callable[[int], Layout]]  # noqa: UP007

_KINDS = {"full_attention", "sliding_attention", "chunked_attention"}
_SHIFTED_LOSS, _LOSSES = "ForCausalLM", {"ForCausalLM", "ForMaskedLM", "ForTokenClassification"}
_PER_TOKEN = ("input_ids", "inputs_embeds", "token_type_ids")
_KNOWN = {*_PER_TOKEN, "position_ids", "attention_mask", "labels", "shift_labels", "num_items_in_batch"}


class Traffic(NamedTuple):
    """Attention of one kind of layer in the last batch, on this rank."""

    kind: str
    """The rule, as text."""
    calls: int
    """Attention calls so far, with those that a checkpoint repeats."""
    received: int
    """Bytes of keys and values that this rank receives in one forward pass of a layer."""
    gathered: int
    """Bytes that it would receive if every rank got all keys."""


@dataclass(eq=False)
class BatchFacts:
    """The facts of a batch that no shard can tell."""

    cp: "ContextParallel"
    layout: Layout
    documents: Documents | None
    positions: Tensor | None
    """``[B, N]``, the position ids of all tokens, if chunks begin at documents."""
    key_mask: Tensor | None
    """``[B, n]`` bool, True for this rank's keys to attend to."""
    key_lengths: Tensor | None
    """``[B]``, the number of real tokens, if padding is on the right only."""
    leading: tuple[int, ...]
    """Padding tokens before the first real one, per batch element."""
    _patterns: dict[tuple[Pattern, Pattern | None], Pattern] = field(default_factory=dict)

    def pattern(self, rule: Pattern, of_layer: Pattern | None) -> Pattern:
        """Return the kept pairs of a layer, from its own rule and the pattern that makes it sparse."""
        found = self._patterns.get((rule, of_layer))
        if found is None:
            found = self._in_documents(rule)
            if self.documents is not None:
                found = found & self.documents
            if of_layer is not None:
                found = found & from_first(of_layer, self.leading, self.layout.n_tokens, self.documents)
            self._patterns[rule, of_layer] = found
        return found

    def _in_documents(self, rule: Pattern) -> Pattern:
        """Count the positions of chunks from the begin of each document, if transformers does."""
        if isinstance(rule, And):
            return self._in_documents(rule.first) & self._in_documents(rule.second)
        if isinstance(rule, Segments) and self.positions is not None:
            chunk = self.positions // rule.length
            begins = _begins(self.positions)
            begins[:, 1:] |= chunk[:, 1:] != chunk[:, :-1]
            return Documents(ids=begins.cumsum(1))
        return from_first(rule, self.leading, self.layout.n_tokens)


class _Probe(Exception):
    """Stands in for the facts of a batch. The first attention that a model hands it to raises it."""

    is_packed = False


def _begins(positions: Tensor) -> Tensor:
    """Return bool ``[B, N]``, True for tokens that begin a document after the row's first, as transformers does."""
    # Positions (0, 1, 2, 0, 1) begin a document at the fourth token, where they do not rise by one.
    return torch.diff(positions, prepend=positions[:, :1] - 1, dim=1) != 1


def shard_mask(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Any],
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **options: Any,
) -> Tensor:
    """Return the rule of a mask function, as transformers' mask interface asks for a mask."""
    if attention_mask is not None:
        raise ValueError(
            "attention_mask: expected none in a model whose tokens are shared between ranks, got "
            f"{attention_mask.shape=}; give the mask of all tokens to shard_batch"
        )
    first = options.get("q_offset", 0)
    if q_length != kv_length or options.get("kv_offset") or isinstance(first, Tensor) or first:
        raise ValueError(f"use_cache: expected False in context parallelism, got {q_length} queries, {kv_length} keys")
    rule = None if options.get("use_vmap") else read_rule(mask_function, 0, kv_length, on_shard=True)
    if rule is None:
        raise ValueError(
            "attention mask: expected causal, sliding, chunked or bidirectional rules in context parallelism, got one "
            f"that a shard cannot tell ({mask_function.__qualname__})"
        )
    kept = KeptPairs(rule, is_packed=packed_ids(mask_function) is not None)
    return carrier(kept, batch_size, q_length, kv_length, device)


def attend_shard(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Compute the attention of one layer for a rank's tokens, like `attend`, with the facts of the batch."""
    refuse_arguments(options, *SOFTMAX, "cp_batch")
    cp_batch: BatchFacts | _Probe | None = options.get("cp_batch")
    if cp_batch is None:
        raise ValueError("cp_batch: expected the facts of the batch, got None; call model(**cp.shard_batch(batch))")
    if not isinstance(attention_mask, PatternMask):
        raise ValueError(
            "attention_mask: expected the layer's rule, got none; something took it from the attention module, as "
            "Accelerate's own context parallelism (cp_size) does"
        )
    kept = attention_mask.kept
    if isinstance(cp_batch, _Probe):
        cp_batch.is_packed = kept.is_packed
        raise cp_batch
    layout, cp = cp_batch.layout, cp_batch.cp
    if query.shape[2] != layout.size(cp.rank):
        raise ValueError(
            f"input_ids: expected the {layout.size(cp.rank)} tokens of rank {cp.rank}, got {query.shape[2]}; give the "
            "model all that shard_batch returns"
        )
    tuned = getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", True)
    if tuned and layout.n_tokens >= getattr(module, "floor_scale", 0):
        raise ValueError(
            f"attn_temperature_tuning: expected fewer than {module.floor_scale} tokens, because longer rows scale "
            f"queries by their place in the shard, got {layout.n_tokens}"
        )
    # A shard knows the layer's rule. Documents and padding are those of the whole row, so the facts add them.
    pattern = cp_batch.pattern(kept.pattern, pattern_of_layer(cp.pattern, module))
    cp.record(kept.pattern, pattern, layout, query, key, value)
    out = ring_attention(
        query,
        key,
        value,
        pattern,
        layout=layout,
        group=cp.group,
        key_mask=cp_batch.key_mask,
        key_lengths=cp_batch.key_lengths,
        **softmax_of(module, query, key, options),
    )
    return out.transpose(1, 2).contiguous(), None


class ContextParallel:
    """A model whose rows are shared by the ranks of a group. `context_parallel` makes one."""

    def __init__(self, model: Any, group: Any, layout: Layouts, pattern: GivenPattern, documents: bool | None) -> None:
        self.group = real_group(group_of(group))
        self.rank, self.size = self.group.rank(), self.group.size()
        if not callable(layout) and layout not in LAYOUTS:
            raise ValueError(f"layout: expected one of {', '.join(LAYOUTS)} or a function, got {layout!r}")
        if documents not in (True, False, None):
            raise ValueError(f"documents: expected True, False or None, got {documents!r}")
        pattern = read_pattern(pattern)
        _check_model(model)
        self.model, self.pattern, self._layout = model, pattern, layout
        self._is_rotary = any("inv_freq" in name for name, _ in model.named_buffers())
        self._loss = getattr(model, "loss_type", None)
        # The probe below runs the model up to its first attention, for which it must have been switched.
        register_pair(NAME, attend_shard, shard_mask)
        switch_back = switch(model, NAME)
        try:
            self._sees_documents = _sees_documents(model)
        except ValueError:
            switch_back()
            raise
        self._documents = documents
        self._traffic: dict[str, tuple[int, tuple[Any, ...]]] = {}

    def layout(self, n_tokens: int) -> Layout:
        """Return the tokens of each rank for rows of ``n_tokens``.

        Raises ValueError if a rank would have no token, or if the function returns another layout.
        """
        given = self._layout
        found = given(n_tokens) if callable(given) else LAYOUTS[given](n_tokens, self.size)
        if not isinstance(found, Layout) or (found.n_ranks, found.n_tokens) != (self.size, n_tokens):
            raise ValueError(f"layout: expected one of {n_tokens} tokens for {self.size} ranks, got {found!r}")
        if empty := [rank for rank in range(self.size) if not found.size(rank)]:
            raise ValueError(
                f"layout: expected tokens at every rank, got none at {empty} from {n_tokens} tokens; pad the "
                "rows, or cut them into smaller units"
            )
        return found

    def shard_batch(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return this rank's part of a batch, with what the model needs to know of the rest.

        Every rank of the group passes the same rows. Labels are shifted over the whole row first. A padding token has
        no label, even if the first real token follows it.

        Args:
            batch: ``input_ids`` or ``inputs_embeds``, and what else the model takes: ``attention_mask`` ``[B, N]`` of
                padding, ``position_ids``, ``labels`` or ``shift_labels``, ``token_type_ids``, ``num_items_in_batch``.

        Returns:
            The arguments of the model. ``num_items_in_batch`` counts the labels of all ranks of the group, if the
            batch does not have it. So the losses of the ranks add up to that of the batch, and gradients are summed.

        Raises:
            ValueError: If ranks hold other rows, a tensor has another shape, an argument cannot be shared between
                ranks, or a rank would have no token.
        """
        tokens = batch.get("input_ids")
        tokens = batch.get("inputs_embeds") if tokens is None else tokens
        if not isinstance(tokens, Tensor) or tokens.dim() < 2:
            raise ValueError(f"batch: expected input_ids or inputs_embeds, got {sorted(batch)}")
        size, n_tokens = tokens.shape[:2]
        self._check_batch(batch, size, n_tokens)
        layout = self.layout(n_tokens)
        self._compare(batch)

        def mine(x: Tensor) -> Tensor:
            return layout.shard(x, self.rank, dim=1).contiguous()

        positions: Tensor | None = batch.get("position_ids")
        if positions is None and not self._is_rotary:
            raise ValueError(
                "position_ids: expected them in the batch, because models without rotary embeddings count them in "
                "ways of their own"
            )
        # A shard alone would count its own from 0.
        positions = torch.arange(n_tokens, device=tokens.device)[None] if positions is None else positions
        positions = positions.expand(size, -1)
        documents = self._documents_of(batch, positions)
        padding = batch.get("attention_mask")
        real = None if padding is None or bool((padding != 0).all()) else padding != 0
        key_mask, key_lengths, leading, device = None, None, (0,), next(self.model.parameters()).device
        if real is not None:
            # Rows of (0, 1, 1) and (1, 1, 1) have ``leading`` (1, 0) and need a mask. Lengths cost an exchange nothing.
            leading, counts = tuple(real.int().argmax(1).tolist()), real.sum(1)
            if torch.equal(real, torch.arange(n_tokens, device=real.device) < counts[:, None]):
                key_lengths = counts.to(device)
            else:
                key_mask = mine(real).to(device)
        of_chunks = positions.cpu() if documents is not None and chunks_begin_at_documents() else None
        facts = BatchFacts(self, layout, documents, of_chunks, key_mask, key_lengths, leading)
        found: dict[str, Any] = {name: mine(batch[name]) for name in _PER_TOKEN if batch.get(name) is not None}
        found |= {"position_ids": mine(positions), "cp_batch": facts}
        if hasattr(self.model.config.get_text_config(), "use_cache"):
            # With a cache, transformers does not look for packed rows.
            found["use_cache"] = False
        if (labels := self._labels(batch)) is not None:
            labels = labels if real is None else labels.masked_fill(~real, -100)
            found["labels"] = mine(labels)
            found["num_items_in_batch"] = (labels != -100).sum()
            if self._loss == _SHIFTED_LOSS:
                found["shift_labels"] = found["labels"]
        if batch.get("num_items_in_batch") is not None:
            found["num_items_in_batch"] = batch["num_items_in_batch"]
        return {name: x for name, x in batch.items() if name not in _KNOWN and x is not None} | found

    def _labels(self, batch: Mapping[str, Any]) -> Tensor | None:
        labels: Tensor | None = batch.get("shift_labels")
        if labels is None and (given := batch.get("labels")) is not None:
            shifts = self._loss == _SHIFTED_LOSS
            labels = nn.functional.pad(given[:, 1:], (0, 1), value=-100) if shifts else given
        if labels is not None and self._loss not in _LOSSES:
            raise ValueError(
                f"labels: expected a model whose loss is a sum over tokens ({', '.join(sorted(_LOSSES))}), got "
                f"{type(self.model).__name__}"
            )
        return labels

    def _documents_of(self, batch: Mapping[str, Any], positions: Tensor) -> Documents | None:
        # With a mask of padding, transformers does not look for packed rows, either.
        honored = batch.get("attention_mask") is None if self._documents is None else self._documents
        # Plans are made on the host.
        begins = _begins(positions).cpu()
        if not honored or not bool(begins.any()):
            return None
        if self._documents is None and not self._sees_documents:
            warnings.warn(
                f"{type(self.model).__name__} does not hand position_ids to its masks, so packed documents see one "
                "another, on one process and here; pass documents=True to keep them apart, or documents=False",
                stacklevel=3,
            )
            self._documents = False
            return None
        return Documents(ids=begins.cumsum(1))

    def _check_batch(self, batch: Mapping[str, Any], size: int, n_tokens: int) -> None:
        for name, x in batch.items():
            if isinstance(x, Tensor) and name not in _KNOWN:
                raise ValueError(f"{name}: expected {', '.join(sorted(_KNOWN))} in context parallelism, got {x.shape=}")
            if name in ("use_cache", "output_router_logits", "output_attentions") and x:
                raise ValueError(f"{name}: expected False in context parallelism, got {x!r}")
            if x is not None and not isinstance(x, Tensor | bool | int | float | str):
                raise ValueError(f"{name}: expected None in context parallelism, got {type(x).__name__}")
            if isinstance(x, Tensor) and name != "num_items_in_batch":
                rows = (1, size) if name == "position_ids" else (size,)
                dims = 3 if name == "inputs_embeds" else 2
                if x.dim() != dims or x.shape[0] not in rows or x.shape[1] != n_tokens:
                    raise ValueError(f"{name}: expected shape {(size, n_tokens)} of all tokens, got {x.shape=}")

    def _compare(self, batch: Mapping[str, Any]) -> None:
        """Raise ValueError, at every rank, if the ranks of the group do not hold the same batch."""
        if self.size == 1:
            return
        tensors = {name: x for name, x in sorted(batch.items()) if isinstance(x, Tensor)}
        content = b"".join(name.encode() + digest_of(x) for name, x in tensors.items())
        digest = digest_of(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(next(self.model.parameters()).device)
        # All ranks gather all digests, so all of them raise, and none waits in the attention of a wrong batch.
        every = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(every, mine, group=self.group)
        others = [rank for rank in range(self.size) if not torch.equal(every[rank], every[0])]
        if others:
            raise ValueError(
                f"batch: expected the same rows at every rank of the context-parallel group, got others at {others} "
                "than at 0; a dataloader that deals different rows to each rank, as Accelerate's does, counts ranks"
            )

    def loader(self, loader: Iterable[Mapping[str, Any]]) -> Iterable[dict[str, Any]]:
        """Return a dataloader whose batches are this rank's parts of another's, with its length and attributes."""
        return _Loader(self, loader)

    def loss(self, loss: Tensor) -> Tensor:
        """Return the sum of the ranks' losses, for logs: the loss of the batch. It has no gradient."""
        total = loss.detach().clone()
        dist.all_reduce(total, group=self.group)
        return total

    @torch.no_grad()
    def unshard(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return all tokens in order, at every rank, from the ranks' outputs, such as logits. It has no gradient."""
        sizes = [x.new_tensor(x.shape[dim], dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, sizes[self.rank].clone(), group=self.group)
        # Gathered tensors need equal shapes, so shards are padded to the longest and cut again.
        counts = [int(size) for size in sizes]
        mine = nn.functional.pad(x.movedim(dim, -1), (0, max(counts) - counts[self.rank])).contiguous()
        every = [torch.empty_like(mine) for _ in counts]
        dist.all_gather(every, mine, group=self.group)
        shards = [part[..., :count].movedim(-1, dim) for part, count in zip(every, counts, strict=True)]
        return self.layout(sum(counts)).unshard(shards, dim)

    def record(
        self, rule: Pattern, pattern: Pattern, layout: Layout, query: Tensor, key: Tensor, value: Tensor
    ) -> None:
        """Remember an attention call for `report`."""
        width = key.shape[0] * key.shape[1] * (key.shape[3] + value.shape[3])
        # Under autocast, what travels is narrower than what the layer was given.
        device = key.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else key.dtype
        kind = rule.text or repr(rule)
        calls = self._traffic.get(kind, (0, ()))[0]
        self._traffic[kind] = calls + 1, (pattern, layout, query.shape[1], query.shape[0], width * dtype.itemsize)

    def report(self) -> list[Traffic]:
        """Return the bytes that this rank receives per forward pass and kind of layer, for the last batch."""
        found = []
        for kind, (calls, (pattern, layout, heads, batch, width)) in self._traffic.items():
            # Every shard on the wire of a ring has the length of the longest.
            received = (self.size - 1) * max(map(layout.size, range(self.size)))
            if not fits_ring(pattern):
                plan = make_plan(pattern, layout, self.rank, num_heads=heads, batch=batch, gather=None)
                received = sum(plan.tokens_received) + sum(plan.tokens_hot) - plan.tokens_hot[self.rank]
            others = layout.n_tokens - layout.size(self.rank)
            found.append(Traffic(kind, calls, received * width, others * width))
        return found


class _Loader:
    def __init__(self, cp: ContextParallel, loader: Iterable[Mapping[str, Any]]) -> None:
        self._cp, self._loader = cp, loader

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(self._cp.shard_batch, self._loader)

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def context_parallel(
    model: Any,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    layout: Layouts = "zigzag",
    *,
    pattern: GivenPattern = None,
    documents: bool | None = None,
) -> ContextParallel:
    """Share each row of a transformers model between the ranks of a group, and return what shares its batches.

    The model is switched in place, before DDP or ``fully_shard`` wraps it. Attention is exact: windows, chunks, sinks,
    softcap, padding and packed documents are those of the model on one process. A rank gets only the keys that the
    layer's rule lets its tokens see.

    Args:
        model: A model with a text input, with or without a head.
        group: The ranks that share rows: a process group, or a mesh with one dimension, ``mesh["cp"]``. Default: all.
        layout: Which tokens each rank gets. "zigzag" balances causal layers, "contiguous" moves least for windows.
            "striped", or a function that returns the `Layout` of a number of tokens.
        pattern: Makes the model sparse, as in `register`. Positions count from the first real token.
        documents: True to keep packed documents apart, False to let them see one another. None: as the model does on
            one process, with a warning if it does not keep them apart.

    Raises:
        ImportError: If transformers is missing or too old.
        ValueError: If a part of the model cannot be shared: attention written by hand, recurrent or convolutional
            layers, an encoder and decoder, positions that depend on the longest ("dynamic", "longrope"), or the
            auxiliary loss of a router.

    Example:
        >>> import torch
        >>> from transformers import MistralConfig, MistralForCausalLM
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # torchrun sets these
        >>> sizes = dict(vocab_size=9, hidden_size=32, intermediate_size=32, num_hidden_layers=1)
        >>> config = MistralConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, sliding_window=128)
        >>> model = MistralForCausalLM(config)
        >>> cp = context_parallel(model, layout="contiguous")
        >>> tokens = torch.randint(9, (1, 1024))
        >>> loss = model(**cp.shard_batch({"input_ids": tokens, "labels": tokens})).loss
        >>> loss.backward()     # then sum the gradients over the ranks; cp.loss(loss) is the loss of the batch
        >>> dist.destroy_process_group()
    """
    return ContextParallel(model, group, layout, pattern, documents)


def _check_model(model: Any) -> None:
    config = model.config.get_text_config()
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(f"model: expected one without cross attention, got {type(model).__name__}")
    if unknown := set(getattr(config, "layer_types", None) or ()) - _KINDS:
        raise ValueError(f"model: expected layers of attention, got {sorted(unknown)} in {type(model).__name__}")
    if getattr(config, "output_router_logits", False):
        raise ValueError(
            "output_router_logits: expected False, got True; the auxiliary loss of a router is no sum over shards"
        )
    for module in model.modules():
        if isinstance(module, nn.Conv1d):
            raise ValueError(f"model: expected no convolutions over tokens, got one in {type(model).__name__}")
        kind = getattr(module, "rope_type", None)
        for name in kind.values() if isinstance(kind, dict) else (kind,):
            if name in ("dynamic", "longrope"):
                raise ValueError(
                    f"rope_type: expected one that does not depend on the longest position, got {name!r}, which reads "
                    "the longest of each shard"
                )


def _sees_documents(model: Any) -> bool:
    """Return True if the model keeps packed documents apart. It computes two tokens up to the first attention."""
    zeros = torch.zeros(1, 2, dtype=torch.int64, device=next(model.parameters()).device)
    options = {"use_cache": False} if hasattr(model.config.get_text_config(), "use_cache") else {}
    try:
        with torch.no_grad():
            model(input_ids=zeros, position_ids=zeros, cp_batch=_Probe(), **options)
    except _Probe as reached:
        return reached.is_packed
    except TypeError as error:
        raise ValueError(f"model: expected one that hands arguments on to its attention, got: {error}") from error
    raise ValueError(f"model: expected attention layers, got none in {type(model).__name__}")
