"""Models that were trained sparse: their indexers choose keys without the scores of all pairs."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.overrides import TorchFunctionMode

from ringtile.adaptive import index_loss, index_topk
from ringtile.functional.chosen import interval_of
from ringtile.integrations.transformers.masks import DROPPED, KeptPairs, PatternMask, carrier
from ringtile.patterns import Causal, Chosen, Pattern
from ringtile.patterns.checks import check_positive
from ringtile.patterns.facts import key_bounds
from ringtile.patterns.traced import outside_graphs


@dataclass(frozen=True, eq=False)
class _Before(Pattern):
    """Query i keeps the keys before ``ends[b, i]``."""

    ends: Tensor

    def allowed(self, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return key < self.ends[0, query]

    @property
    def batch_size(self) -> int | None:
        return len(self.ends) if len(self.ends) > 1 else None

    def batch_row(self, batch: int) -> Pattern:
        return _Before(self.ends[batch : batch + 1]) if len(self.ends) > 1 else self


class _Visible(Tensor):
    """The keys that the queries of GLM-5.3-Flash see, bool ``[B, Nq, Nk]`` without memory."""

    at: Tensor
    """The position of each query."""
    valid: Tensor | None = None
    """bool ``[B, Nk]``."""
    pool_ends: Tensor | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        x, name, valid = args[0], func.__name__.strip("_"), args[0].valid
        if name == "and" and valid is None:
            return _visible(x.at, args[1][:, 0])
        if name == "and" and x.pool_ends is not None:
            keep = args[1][:, 0] & valid.gather(1, x.pool_ends)
            # Pools that are no choice have any end.
            ends = torch.where(keep, x.pool_ends, 0).cummax(1).values
            n_ended = torch.searchsorted(ends, x.at.expand(len(ends), -1).contiguous(), right=True)
            return carrier(KeptPairs(_Before(n_ended), 0, keep, 0), len(ends), len(x.at), ends.shape[1], x.device)
        if name == "gather" and kwargs is not None:
            index: Tensor = kwargs["index"]
            if index.stride(1) == 0:
                # The last key of each pool, the same for all queries.
                return _visible(x.at, valid, index[:, 0])
            return valid.gather(1, index.flatten(1)).view_as(index) & (index <= x.at[:, None])
        if name == "long":
            return x
        if name == "sum":
            return valid.long().cumsum(1)[:, x.at]
        if name == "get":
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        raise ValueError(f"indexer: expected the steps of GLM-5.3-Flash's, got {name}; use attn_implementation='eager'")


def _visible(at: Tensor, valid: Tensor | None = None, pool_ends: Tensor | None = None) -> _Visible:
    batch, n_keys = (1, 0) if valid is None else valid.shape
    found = torch.zeros((), dtype=torch.bool, device=at.device).expand(batch, len(at), n_keys).as_subclass(_Visible)
    found.at, found.valid, found.pool_ends = at, valid, pool_ends
    return found


class _Streamed(TorchFunctionMode):
    """Runs an indexer as it is written, but for the scores of all pairs: they stay shapes until it asks for the best.

    The scores are ``sum_h w_h * relu(q_h @ k)``, in transformers' steps: matmul, scale, relu, matmul, mask, topk. Or
    weights and sum in place of the second matmul.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kept: KeptPairs | None = None
        self.seen: _Visible | None = None
        self.found: Tensor | None = None
        self.scores: Tensor | None = None
        self.relu = False
        self.factor: Any = 1
        self.query = self.key = self.weights = torch.empty(0, dtype=torch.float32, device="cpu")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.__name__.strip("_")
        if name == "invert" and isinstance(args[0], PatternMask):
            return args[0]
        if name == "le" and args[0].shape[:2] == (1, 1) and args[1].shape[::2] == (1, 1):
            return _visible(args[1].flatten())
        if name == "and" and isinstance(args[0], _Visible):
            self.seen = args[0]
        if name == "gather" and isinstance(args[0], PatternMask):
            # Of what was chosen, -1 is none.
            return args[2] >= 0
        if self.scores is not None and name == "ge" and args[0].shape == (1, 1, self.scores.shape[-1]):
            # The entries that have ended, by number.
            kept = KeptPairs(_Before(args[1].squeeze(-1)))
            return carrier(kept, len(args[1]), args[1].shape[1], self.scores.shape[-1], self.scores.device)
        if self.scores is None and name == "matmul":
            self.query, self.key = args
            return self._scores(*self.query.shape[:3], self.key.shape[3])
        if self.scores is None or all(x is not self.scores for x in args) or name == "get":
            return func(*args, **kwargs)
        match name:
            case "mul" if isinstance(args[1], Tensor) and not len(self.weights):
                self.weights = args[1].squeeze(3).transpose(1, 2)
                return self.scores
            case "mul" if not isinstance(args[1], Tensor) and args[1] > 0:
                self.factor *= args[1]
                return self.scores
            case "relu" if not len(self.weights):
                self.relu = True
                return self.scores
            case "matmul" if not len(self.weights):
                self.weights = args[0].squeeze(2).transpose(1, 2)
                return self._scores(*self.scores.shape[:2], 1, self.scores.shape[3])
            case "squeeze":
                return self._scores(*self.scores.shape[:2], self.scores.shape[3])
            case "sum" if self.scores.dim() == 4 and kwargs == {"dim": 2}:
                return self._scores(*self.scores.shape[:2], self.scores.shape[3])
            case "masked_fill" if isinstance(args[1], PatternMask) and args[2] <= DROPPED:
                self.kept = args[1].kept
                return self.scores
            case "topk" if kwargs == {"dim": -1} and not args[1]:
                self.scores = None
                return SimpleNamespace(indices=self.query.new_empty(*self.query.shape[:2], 0, dtype=torch.int64))
            case "topk" if kwargs == {"dim": -1} and self.kept is not None:
                kept, self.scores = self.kept, None
                self.found = index_topk(
                    self.query.transpose(1, 2),
                    self.key.mT,
                    args[1],
                    weights=self.weights,
                    relu=self.relu,
                    pattern=kept.pattern,
                    start=kept.start,
                    key_mask=kept.key_mask,
                )
                return SimpleNamespace(indices=self.found[:, 0].long())
        raise ValueError(
            f"indexer: expected the scores of DeepSeek-V3.2's, got {name}; use attn_implementation='eager'"
        )

    def _scores(self, *shape: int) -> Tensor:
        self.scores = self.query.new_zeros(()).expand(shape)
        return self.scores


@outside_graphs
def _choose_tokens(indexer: nn.Module, *given: Any, **named: Any) -> Any:
    """Run an indexer of DeepSeek's kind."""
    if not any(isinstance(x, PatternMask) for x in (*given, *named.values())):
        return type(indexer).forward(indexer, *given, **named)
    return _streamed(indexer, *given, **named)[0]


def _streamed(indexer: nn.Module, *given: Any, **named: Any) -> tuple[Any, _Streamed]:
    """Run an indexer as it is written, in chunks, and keep what its loss needs if it learns."""
    learning, own = _learning(indexer), type(indexer).forward
    if learning is None:
        with _Streamed() as scored:
            return own(indexer, *given, **named), scored
    # transformers' forward records no gradient, in most families. The layer's own tensors are to get none.
    given = _detached(given)
    named = {name: _detached(x) for name, x in named.items()}
    with torch.enable_grad(), _Streamed() as scored:
        result = getattr(own, "__wrapped__", own)(indexer, *given, **named)
    learning.keep(
        index_query=scored.query.transpose(1, 2),
        index_key=scored.key.mT,
        weights=scored.weights * scored.factor,
        relu=scored.relu,
        indices=scored.found,
    )
    return result, scored


_LEARNS = "_ringtile_learning"


@dataclass
class _Learning:
    """How the indexers of a model learn while their losses are collected."""

    warm_up: bool
    rows: int | None
    losses: list[Tensor] = field(default_factory=list)
    scored: dict[str, Any] | None = None
    """What the indexer that chose last tells `index_loss`, until its layer attends."""
    chosen: Chosen | None = None
    """What it chose, if its layer is not told."""
    visible: KeptPairs | None = None

    def keep(self, **known: Any) -> None:
        self.scored = (self.scored or {}) | known | ({"indices": None} if self.warm_up else {})


def _detached(x: Any) -> Any:
    if isinstance(x, tuple):
        # Angles, which Mistral Large 4 learns.
        return tuple(map(_detached, x))
    return x.detach() if isinstance(x, Tensor) and not isinstance(x, PatternMask) else x


def _learning(module: nn.Module) -> _Learning | None:
    return getattr(module, _LEARNS, None)


@contextmanager
def index_losses(model: nn.Module, *, warm_up: bool = False, rows: int | None = None) -> Iterator[list[Tensor]]:
    """Collect the losses of a model's indexers: a list that each layer's `index_loss` joins in the calls inside.

    For models of `use_ringtile` that were trained sparse: DeepSeek-V3.2 (arXiv:2512.02556), its kind and V4, MiniMax-M3
    (arXiv:2606.13392), GLM-5.3-Flash and Qwen4-Exp. The losses give a gradient to the weights of the indexers alone,
    which transformers does not. Add them to your loss, or train by them alone. An indexer learns from the attention to
    what it scores: keys, pools of keys, or compressed keys. Other keys and sinks take no part. Leave out gradient
    checkpointing, which computes a layer again outside of the context.

    Args:
        model: The model. Layers that use the choice of an earlier layer have no loss.
        warm_up: Has attention be dense, and indexers learn from all keys. Otherwise they learn from the chosen keys.
        rows: Number of drawn queries that a call counts. Default: all of them.

    Raises:
        ValueError: If the model has no indexers in `use_ringtile`, or if ``rows`` is not positive.

    Example:
        >>> from transformers import DeepseekV32Config, DeepseekV32ForCausalLM
        >>> from ringtile.integrations.transformers import use_ringtile
        >>> sizes = dict(vocab_size=9, hidden_size=32, intermediate_size=32, num_hidden_layers=1, index_n_heads=2)
        >>> config = DeepseekV32Config(**sizes, num_attention_heads=4, mlp_layer_types=["dense"])
        >>> model = use_ringtile(DeepseekV32ForCausalLM(config))
        >>> with index_losses(model, warm_up=True) as losses:
        ...     out = model(torch.randint(9, (1, 50)))
        >>> sum(losses).backward()
    """
    if rows is not None:
        check_positive(rows=rows)
    names = {name for name in INDEXERS if name.endswith("Indexer")}
    found = [module for module in model.modules() if type(module).__name__ in names]
    if not found or any("forward" not in module.__dict__ for module in found):
        raise ValueError(
            f"model: expected indexers that choose keys and use_ringtile, got {type(model).__name__} with {len(found)} "
            "indexers"
        )
    learning = _Learning(warm_up, rows)
    for module in model.modules():
        module.__dict__[_LEARNS] = learning
    try:
        yield learning.losses
    finally:
        for module in model.modules():
            module.__dict__.pop(_LEARNS, None)


def learned(
    attention: nn.Module, query: Tensor, key: Tensor, kept: KeptPairs, chosen: Chosen | None, scale: Any
) -> Chosen | None:
    """Keep the loss of the indexer of an attention module, if it learns. Return the lists to attend to, or None."""
    learning = _learning(attention)
    if learning is None:
        return chosen
    chosen, known = learning.chosen if chosen is None else chosen, learning.scored
    learning.scored = learning.chosen = None
    if known is not None:
        rule, n_scores = known.pop("visible", kept), known["index_key"].shape[2]
        # Compressed keys are behind the tokens of their layer.
        own = key if "pools" in known else key[:, :, key.shape[2] - n_scores :]
        drawn = None if learning.rows is None else torch.randperm(query.shape[2], device=query.device)[: learning.rows]
        start: Any = rule.start
        if rule.key_mask is not None:
            # Padding after the tokens sees them. Before all keys it sees none, and counts 0.
            at = torch.arange(start, start + query.shape[2], device=query.device)
            start = torch.where(rule.key_mask[:, at], at, -1)
        loss = index_loss(
            **known,
            query=query,
            key=own,
            pattern=rule.pattern,
            start=start,
            key_mask=rule.key_mask,
            scale=scale,
            rows=drawn,
        )
        learning.losses.append(loss)
    return None if learning.warm_up else chosen


@outside_graphs
def _choose_blocks(
    indexer: Any, hidden_states: Tensor, position_embeddings: Any, cache: Any, position_ids: Tensor
) -> Tensor:
    """Choose the blocks of MiniMax-M3's indexer."""
    from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import apply_rotary_pos_emb

    learning = _learning(indexer)
    hidden_states = hidden_states if learning is None else hidden_states.detach()
    heads = [
        project(hidden_states).unflatten(2, (-1, indexer.head_dim)) for project in (indexer.q_proj, indexer.k_proj)
    ]
    query, key = (norm(x).transpose(1, 2) for norm, x in zip((indexer.q_norm, indexer.k_norm), heads, strict=True))
    angles = (x[..., : indexer.head_dim] for x in position_embeddings)
    query, key = apply_rotary_pos_emb(query, key, *angles)
    if cache is not None:
        key = cache.layers[indexer.layer_idx].update_index(key)
    n = min(indexer.topk_blocks, -(-key.shape[2] // indexer.block_size))
    groups, block, local = query.shape[1], indexer.block_size, indexer.local_blocks
    # Positions count real tokens and keys count all, as in transformers.
    found = index_topk(query, key, n, pattern=Causal(), start=position_ids, groups=groups, block=block, local=local)
    if learning is not None:
        # It learns by key, with the factor of attention (arXiv:2606.13392).
        weights = query.new_full(query.shape[:3], indexer.head_dim**-0.5)
        learning.keep(index_query=query, index_key=key, weights=weights, groups=groups, block=block, indices=found)
    return found


@outside_graphs
def _choose_pools(indexer: Any, hidden_states: Tensor, **named: Any) -> Any:
    """Run the indexer of GLM-5.3-Flash. One query has few scores."""
    learning = _learning(indexer)
    if hidden_states.shape[1] == 1 and learning is None:
        return type(indexer).forward(indexer, hidden_states, **named)
    found, scored = _streamed(indexer, hidden_states, **named)
    if learning is not None:
        assert scored.kept is not None
        assert scored.seen is not None
        first, block = int(scored.seen.at[0]), indexer.index_kpool
        learning.visible = KeptPairs(Causal(), first, scored.seen.valid, first)
        complete: Any = scored.kept.key_mask
        learning.keep(pools=torch.where(complete, scored.seen.pool_ends - (block - 1), -1), block=block)
    return found


class _Unbiased(TorchFunctionMode):
    """Runs a compressor of DeepSeek-V4 as it is written, but for its mask of all entries ``[B, 1, Nq, entries]``."""

    def __init__(self, n_queries: int) -> None:
        super().__init__()
        self.n_queries = n_queries
        self.mask: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.strip("_")
        if name == "new_full" and args[0].dim() == 4:
            batch, _, n_entries, _ = args[0].shape
            if tuple(args[1]) == (batch, 1, self.n_queries, n_entries + 1):
                self.mask = carrier(KeptPairs(Causal()), batch, self.n_queries, n_entries, args[0].device)
                return self.mask
        if self.mask is None or args[0] is not self.mask:
            return func(*args, **(kwargs or {}))
        if name == "scatter" and args[1] == -1:
            n_entries = self.mask.shape[3]
            chosen = Chosen(torch.where(args[2] < n_entries, args[2], -1).int())
            self.mask.kept = KeptPairs(chosen)  # type: ignore[attr-defined]
        if name in ("scatter", "getitem"):
            return self.mask
        return func(*args, **(kwargs or {}))


def _compress_chosen(compressor: Any, hidden_states: Tensor, *rest: Any) -> Any:
    """Compress by a compressor of DeepSeek-V4 that has an indexer."""
    with _Unbiased(hidden_states.shape[1]):
        return type(compressor).forward(compressor, hidden_states, *rest)


def _compress(compressor: Any, hidden_states: Tensor, residual: Tensor, position_ids: Tensor, *rest: Any) -> Any:
    """Compress by a compressor of DeepSeek-V4. Its mask has the complete entries before each query."""
    # It makes no mask for one query.
    entries, _ = type(compressor).forward(compressor, hidden_states, residual, position_ids[:, :1], *rest)
    (batch, n_queries), n_entries = hidden_states.shape[:2], entries.shape[2]
    if n_queries == 1 or not n_entries:
        return entries, None
    number = torch.arange(n_entries, dtype=torch.int32, device=entries.device)
    ended = (position_ids + 1) // compressor.compress_rate
    chosen = Chosen(torch.where(number < ended[:, None, :, None], number, -1))
    return entries, carrier(KeptPairs(chosen), batch, n_queries, n_entries, entries.device)


def _choose_entries(indexer: Any, *given: Any) -> Any:
    """Run the indexer of DeepSeek-V4."""
    found, scored = _streamed(indexer, *given)
    learning = _learning(indexer)
    if learning is None or scored.kept is None:
        return found
    learning.keep(visible=scored.kept)
    if not learning.warm_up:
        return found
    ended, number = scored.kept.pattern.ends, torch.arange(scored.key.shape[3], device=found.device)  # type: ignore[attr-defined]
    return torch.where(number < ended.unsqueeze(2), number, -1)


def _choose_groups(
    indexer: Any, hidden_states: Tensor, position_embeddings: Any, attention_mask: Tensor, cache: Any
) -> Tensor:
    """Choose groups of consecutive keys as Qwen4's indexer: complete ones by their means, and the keys after them."""
    given = hidden_states, position_embeddings, attention_mask, cache
    if not isinstance(attention_mask, PatternMask):
        found: Tensor = type(indexer).forward(indexer, *given)
        return found
    from transformers.models.qwen4_exp.modeling_qwen4_exp import apply_rotary_pos_emb

    learning = _learning(indexer)
    hidden_states = hidden_states if learning is None else hidden_states.detach()
    batch, n_queries, _ = hidden_states.shape
    ratio, (cos, sin) = indexer.compress_ratio, position_embeddings
    heads = indexer.index_qk_proj(hidden_states).unflatten(2, (-1, indexer.index_head_dim))
    query, keys = heads.split([indexer.index_n_heads, indexer.index_kv_heads], 2)
    angles = {"cos": cos[:, -n_queries:], "sin": sin[:, -n_queries:], "unsqueeze_dim": 2}
    query, keys = apply_rotary_pos_emb(indexer.q_layernorm(query), **angles), keys.squeeze(2)
    if cache is not None:
        keys = cache.update_indexer(keys, indexer.layer_idx)
    low, high = _seen(attention_mask.kept, batch, n_queries, attention_mask.shape[3])
    n_groups = (high - low) // ratio
    tail = (low + n_groups * ratio).unsqueeze(2) + torch.arange(ratio - 1, device=keys.device)
    chosen = keys.new_full((batch, n_queries, indexer.block_topk * ratio), -1, dtype=torch.int64)
    wide = torch.promote_types(query.dtype, torch.float32)
    for b in range(batch):
        runs, sizes = torch.stack([low[b], n_groups[b]]).unique_consecutive(dim=1, return_counts=True)
        begin, pooled, first = 0, keys[:0], -1
        for (first_key, count), size in zip(runs.T.tolist(), sizes.tolist(), strict=True):
            rows = slice(begin, begin + size)
            begin += size
            if not count:
                continue
            if first_key != first:
                # The groups of all queries that see the same first key.
                first, most = first_key, int(n_groups[b][low[b] == first_key].max())
                starts = torch.arange(first, first + most * ratio, ratio, device=keys.device)
                means = keys[b, first : first + most * ratio].unflatten(0, (most, ratio)).to(wide).mean(1)
                turned = {"cos": cos[b, starts], "sin": sin[b, starts]}
                pooled = apply_rotary_pos_emb(indexer.k_layernorm(means.to(keys.dtype)).unsqueeze(1), **turned)
            products = query[b, rows].to(wide) @ pooled[:count, 0].mT.to(wide)
            best = products.relu_().sum(1).topk(min(indexer.block_topk, count)).indices
            tokens = first + (best * ratio).unsqueeze(2) + torch.arange(ratio, device=keys.device)
            chosen[b, rows, : tokens.shape[1] * ratio] = tokens.flatten(1)
    tail = tail.masked_fill(tail >= high.unsqueeze(2), -1)
    indices = torch.cat([chosen, tail], 2).unsqueeze(1).int()
    if learning is not None:
        learning.chosen = Chosen(indices)
        learning.keep(**_of_groups(indexer, query, keys, position_embeddings, low, n_groups, chosen[..., ::ratio]))
        return attention_mask
    kept = attention_mask.kept._replace(pattern=Chosen(indices))
    return carrier(kept, batch, n_queries, attention_mask.shape[3], keys.device)


def _of_groups(
    indexer: Any, query: Tensor, keys: Tensor, angles: Any, low: Tensor, n_groups: Tensor, chosen: Tensor
) -> dict[str, Any]:
    """Return what `index_loss` needs of groups: their means in one row per batch element, and the chosen by number."""
    from transformers.models.qwen4_exp.modeling_qwen4_exp import apply_rotary_pos_emb

    ratio, n_keys, device = indexer.compress_ratio, keys.shape[1], keys.device
    runs = [
        torch.cat(
            [torch.arange(x, x + int(n[at == x].max()) * ratio, ratio, device="cpu") for x in at.unique().tolist()]
        )
        for at, n in zip(low, n_groups, strict=True)
    ]
    # Groups that fill up a row are after all keys.
    pools = pad_sequence(runs, batch_first=True, padding_value=n_keys).to(device)
    row, first = torch.arange(len(keys), device=device).unsqueeze(1), pools.clamp(max=n_keys - 1)
    tokens = (first.unsqueeze(2) + torch.arange(ratio, device=device)).clamp(max=n_keys - 1)
    means = keys[row.unsqueeze(2), tokens].to(torch.promote_types(keys.dtype, torch.float32)).mean(2).to(keys.dtype)
    turned = {"cos": angles[0][row, first], "sin": angles[1][row, first], "unsqueeze_dim": 2}
    pooled = apply_rotary_pos_emb(indexer.k_layernorm(means).unsqueeze(2), **turned)
    query = query.transpose(1, 2)
    numbers = torch.searchsorted(pools, chosen.flatten(1).contiguous()).view(chosen.shape).masked_fill(chosen < 0, -1)
    weights = query.new_full(query.shape[:3], query.shape[3] ** -0.5)
    known = {"index_query": query, "index_key": pooled.transpose(1, 2), "weights": weights, "relu": True}
    return known | {"block": ratio, "pools": pools, "indices": numbers.unsqueeze(1)}


def _seen(kept: KeptPairs, batch: int, n_queries: int, n_keys: int) -> tuple[Tensor, Tensor]:
    """Return the interval ``[low, high)`` of keys that each query of a mask sees, int64 ``[B, Nq]``."""
    at = torch.arange(n_queries, device="cpu") + kept.start
    bounds = [key_bounds(kept.pattern.batch_row(b), at, n_keys) for b in range(batch)]
    known = [each for each in bounds if each is not None]
    mask = torch.ones(1, n_keys, dtype=torch.bool, device="cpu") if kept.key_mask is None else kept.key_mask.cpu()
    inside = interval_of(mask)
    if len(known) < batch or inside is None:
        raise ValueError(
            f"attention_mask: expected keys that follow each other for each query, got {kept.pattern!r} and padding"
        )
    low, high = (torch.stack(side) for side in zip(*known, strict=True))
    low = torch.maximum(low, inside[0])
    return low, torch.minimum(high, inside[1]).maximum(low)


@outside_graphs
def _attend_outside_graphs(attention: nn.Module, *given: Any, **named: Any) -> Any:
    return type(attention).forward(attention, *given, **named)


def _mask_of_pools(attention: Any, topk_indices: Tensor, query_states: Tensor, kv_length: int) -> Tensor:
    """Return the mask of the tokens that the indexer of GLM-5.3-Flash chose, from its attention module."""
    batch, _, n_queries, _ = query_states.shape
    start, chosen, learning = kv_length - n_queries, Chosen(topk_indices.unsqueeze(1)), _learning(attention)
    kept = KeptPairs(chosen, start, None, start)
    if learning is not None and learning.visible is not None:
        learning.chosen, kept = chosen, learning.visible
    return carrier(kept, batch, n_queries, kv_length, query_states.device)


_OF_TOKENS = "DeepseekV32 AXK2 GlmMoeDsa MistralLarge4Text HYV4 HYV4VL Dots3NoteText".split()
INDEXERS: dict[str, dict[str, Any]] = {
    **{f"{family}Indexer": {"forward": _choose_tokens} for family in _OF_TOKENS},
    "MiniMaxM3VLIndexer": {"forward": _choose_blocks},
    "Glm5NextTextIndexer": {"forward": _choose_pools},
    "Glm5NextTextAttention": {"build_attention_mask_from_topk": _mask_of_pools},
    "Qwen4ExpTextQSAIndexer": {"forward": _choose_groups},
    "Qwen4ExpTextAttention": {"forward": _attend_outside_graphs},
    "DeepseekV4Indexer": {"forward": _choose_entries},
    "DeepseekV4CSACompressor": {"forward": _compress_chosen},
    "DeepseekV4HCACompressor": {"forward": _compress},
    "DeepseekV4Attention": {"forward": _attend_outside_graphs},
}
"""The methods that have indexers choose in chunks. The modules keep their weights and their caches."""
