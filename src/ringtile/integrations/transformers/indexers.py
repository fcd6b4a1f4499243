"""Models that were trained sparse: their indexers choose keys without the scores of all pairs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ringtile.adaptive import index_topk
from ringtile.integrations.transformers.masks import KeptPairs, PatternMask, carrier
from ringtile.patterns import Causal, Chosen


class _Streamed(TorchFunctionMode):
    """Runs an indexer as it is written, but for the scores of all pairs: they stay shapes until it asks for the best.

    The scores are ``sum_h w_h * relu(q_h @ k)``, in transformers' steps: matmul, scale, relu, matmul, mask, topk.
    """

    def __init__(self, kept: KeptPairs) -> None:
        super().__init__()
        self.kept = kept
        self.scores: Tensor | None = None
        self.relu = False
        self.query = self.key = self.weights = torch.empty(0)

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, func.__name__
        if name == "__invert__" and isinstance(args[0], PatternMask):
            return args[0]
        if self.scores is None and name == "matmul":
            self.query, self.key = args
            return self._scores(*self.query.shape[:3], self.key.shape[3])
        if self.scores is None or all(x is not self.scores for x in args) or name == "__get__":
            return func(*args, **kwargs)
        match name:
            case "mul" if args[1] > 0:
                return self.scores
            case "relu":
                self.relu = True
                return self.scores
            case "matmul":
                self.weights = args[0].squeeze(2).transpose(1, 2)
                return self._scores(*self.scores.shape[:2], 1, self.scores.shape[3])
            case "squeeze":
                return self._scores(*self.scores.shape[:2], self.scores.shape[3])
            case "masked_fill" if isinstance(args[1], PatternMask):
                return self.scores
            case "topk":
                rule: dict[str, Any] = {
                    "pattern": self.kept.pattern,
                    "start": self.kept.start,
                    "key_mask": self.kept.key_mask,
                }
                query, key = self.query.transpose(1, 2), self.key.mT
                found = index_topk(query, key, args[1], weights=self.weights, relu=self.relu, **rule)
                return SimpleNamespace(indices=found[:, 0])
        raise ValueError(
            f"indexer: expected the scores of DeepSeek-V3.2's, got {name}; use attn_implementation='eager'"
        )

    def _scores(self, *shape: int) -> Tensor:
        self.scores = self.query.new_zeros(()).expand(shape)
        return self.scores


@torch.compiler.disable(reason="an indexer's scores are computed in chunks outside graphs")  # type: ignore[untyped-decorator]
def _choose_tokens(indexer: nn.Module, *given: Any, **named: Any) -> Any:
    """Run an indexer of DeepSeek's kind."""
    own = partial(type(indexer).forward, indexer, *given, **named)
    masks = [x for x in (*given, *named.values()) if isinstance(x, PatternMask)]
    if not masks:
        return own()
    with _Streamed(masks[0].kept):
        return own()


@torch.compiler.disable(reason="an indexer's scores are computed in chunks outside graphs")  # type: ignore[untyped-decorator]
def _choose_blocks(
    indexer: Any, hidden_states: Tensor, position_embeddings: Any, past_key_values: Any, position_ids: Tensor
) -> Tensor:
    """Choose the blocks of MiniMax-M3's indexer."""
    from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import apply_rotary_pos_emb

    heads = [
        project(hidden_states).unflatten(2, (-1, indexer.head_dim)) for project in (indexer.q_proj, indexer.k_proj)
    ]
    query, key = (norm(x).transpose(1, 2) for norm, x in zip((indexer.q_norm, indexer.k_norm), heads, strict=True))
    angles = (x[..., : indexer.head_dim] for x in position_embeddings)
    query, key = apply_rotary_pos_emb(query, key, *angles)
    if past_key_values is not None:
        key = past_key_values.layers[indexer.layer_idx].update_index(key)
    n = min(indexer.topk_blocks, -(-key.shape[2] // indexer.block_size))
    how = {"groups": query.shape[1], "block": indexer.block_size, "local": indexer.local_blocks}
    # Positions count real tokens and keys count all, in transformers too.
    return index_topk(query, key, n, pattern=Causal(), start=position_ids, **how)


def _mask_of_pools(attention: Any, topk_indices: Tensor, query_states: Tensor, kv_length: int) -> Tensor:
    """Return the mask of the tokens that the indexer of GLM-5.3-Flash chose, from its attention module."""
    if attention.config._attn_implementation in ("eager", "sdpa"):
        mask: Tensor = type(attention).build_attention_mask_from_topk(attention, topk_indices, query_states, kv_length)
        return mask
    batch, _, n_queries, _ = query_states.shape
    start = kv_length - n_queries
    kept = KeptPairs(Chosen(topk_indices.unsqueeze(1)), start, None, start)
    return carrier(kept, batch, n_queries, kv_length, query_states.device)


_OF_TOKENS = "DeepseekV32 AXK2 GlmMoeDsa MistralLarge4Text HYV4 Dots3NoteText".split()
_KINDS = {f"{family}Indexer": _choose_tokens for family in _OF_TOKENS} | {"MiniMaxM3VLIndexer": _choose_blocks}


def stream_indexers(model: nn.Module) -> None:
    """Have the indexers of a model choose in chunks, in place. They keep their weights and their caches."""
    for module in model.modules():
        # A partial function is copied and pickled with its module, which a method that is no member is not.
        if (choose := _KINDS.get(type(module).__name__)) is not None:
            module.__dict__["forward"] = partial(choose, module)
        elif hasattr(module, "build_attention_mask_from_topk"):
            module.__dict__["build_attention_mask_from_topk"] = partial(_mask_of_pools, module)
