"""Multi-head attention with a sparse pattern, in place of `torch.nn.MultiheadAttention`."""

from __future__ import annotations

import math
from functools import partial
from inspect import signature
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ringtile.functional import merge_attention, sparse_attention
from ringtile.functional.attend import Attend, checked_rule, rules_of
from ringtile.functional.attention import PatternLike, check_plain
from ringtile.index import build_index
from ringtile.modules.masks import read_attn_mask, read_key_padding_mask
from ringtile.modules.tile_weights import tile_weights
from ringtile.patterns import Causal, Dense, Pattern
from ringtile.patterns.checks import check_number, refuse_unknown
from ringtile.patterns.private import refuse

MAX_WEIGHTS = 1 << 24
"""Largest number of elements, B * H * Nq * Nk, of a dense weight matrix with a sparse pattern."""

_PROJECTIONS = ("in_proj_weight", "in_proj_bias", "q_proj_weight", "k_proj_weight", "v_proj_weight")
_SHARED_NAMES = (*_PROJECTIONS, "bias_k", "bias_v", "add_zero_attn", "training")
"""Attributes with the names of arguments of PyTorch's function."""


class _Given(NamedTuple):
    """The arguments of a call, named as in PyTorch's function."""

    query: Tensor
    key: Tensor
    value: Tensor
    key_padding_mask: Tensor | None
    need_weights: bool | Literal["block_sparse"]
    attn_mask: Tensor | None
    average_attn_weights: bool
    is_causal: bool


class SparseMultiheadAttention(nn.MultiheadAttention):
    """Multi-head attention with a sparse pattern: a drop-in for `torch.nn.MultiheadAttention`.

    It takes the same arguments and masks and has the same parameters, so checkpoints load in both directions. With
    ``pattern=None`` it calls PyTorch's own function and returns the same results.

    You can use it inside PyTorch's transformer layers, in training and in eval mode. It disables their fused fast path,
    which would ignore the pattern. `torch.nn.TransformerEncoder` warns about that unless you build it with
    ``enable_nested_tensor=False``.

    Masks mean the same as in PyTorch. They only remove pairs, and never add one that the pattern leaves out:

    * ``key_padding_mask`` drops keys. Floating-point values other than 0 and -inf are added to the scores.
    * ``attn_mask`` intersects with the pattern. With a sparse pattern it must be bool, or floating point with only 0
      and -inf. In a row with a 0, -1e9 and less, or half of the lowest number of the dtype, count as -inf: their
      weights are 0 in PyTorch. If it is the causal mask (lower right), the module runs causal attention. The module
      reads a mask again after it has changed. It does not notice a change through ``.data`` if the mask has more than
      16 MiB or is on a GPU.
    * ``is_causal`` without a mask means causal attention. (PyTorch requires the mask as well.) With a mask and a
      pattern it is only a hint, and the mask decides. Inside `torch.compile` the mask's values are not available, so
      the hint decides.
    * ``add_bias_kv`` and ``add_zero_attn`` add keys that every query keeps.

    If the pattern leaves a query with no keys, its output is the bias of ``out_proj``.

    Args:
        embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype: As in
            `torch.nn.MultiheadAttention`.
        pattern: Which pairs to keep: a `ringtile.patterns.Pattern`, a FlexAttention `BlockMask` or a bool matrix of
            tiles. The last two fix the lengths. Default: all pairs.
        attend: Function that computes the attention, see `Attend`. Default: `sparse_attention`.

    Raises ValueError if an argument is out of range, or if the pattern is defined for a different number of heads.

    >>> from ringtile.patterns import Causal, Window
    >>> attention = SparseMultiheadAttention(64, 4, batch_first=True, pattern=Causal() & Window(128))
    >>> x = torch.randn(2, 1000, 64)
    >>> out, weights = attention(x, x, x, need_weights=False)
    >>> out.shape, weights
    (torch.Size([2, 1000, 64]), None)
    """

    pattern: Pattern | None
    attend: Attend

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        pattern: PatternLike | None = None,
        attend: Attend = sparse_attention,
    ) -> None:
        if num_heads < 1 or embed_dim < 1 or embed_dim % num_heads:
            raise ValueError(f"embed_dim: expected a positive multiple of num_heads, got {embed_dim=}, {num_heads=}")
        check_number("dropout", dropout, "a probability in [0, 1)", 0, 1)
        for name, width in (("kdim", kdim), ("vdim", vdim)):
            if width is not None and width < 1:
                raise ValueError(f"{name}: expected a positive width or None, got {name}={width}")
        # Before the parameters exist: a refused pattern must not draw from the generator.
        rule = checked_rule(pattern, attend, num_heads)
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
        )
        self._set_rule(rule, attend)

    def _set_rule(self, pattern: Pattern | None, attend: Attend) -> None:
        if "_qkv_same_embed_dim" not in nn.TransformerEncoderLayer.forward.__code__.co_names:
            refuse("torch.nn:MultiheadAttention._qkv_same_embed_dim", "patterns in PyTorch's layers")
        self.pattern, self.attend = pattern, attend
        # PyTorch's layers read this before they call a fused kernel with dense attention. Here, in_proj_weight tells if
        # the weights are packed.
        self._qkv_same_embed_dim = False

    # PyTorch initializes packed and separate weights in other ways, and decides by the flag.
    def _reset_parameters(self) -> None:
        self._qkv_same_embed_dim = self.in_proj_weight is not None
        super()._reset_parameters()
        self._qkv_same_embed_dim = False

    @property
    def _is_dense(self) -> bool:
        """True if the module keeps all pairs, so that PyTorch's own function computes it."""
        return self.attend is sparse_attention and (self.pattern is None or isinstance(self.pattern, Dense))

    def extra_repr(self) -> str:
        """Return the arguments, for `repr`."""
        named = self.attend.func if isinstance(self.attend, partial) else self.attend
        attend = getattr(named, "__name__", type(named).__name__)
        return (
            f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, dropout={self.dropout}, "
            f"batch_first={self.batch_first}, pattern={self.pattern!r}, attend={attend}"
        )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool | Literal["block_sparse"] = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        **options: object,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute attention. Arguments and results are those of `torch.nn.MultiheadAttention`.

        Args:
            query: ``[Nq, B, E]``, ``[B, Nq, E]`` with ``batch_first``, or ``[Nq, E]`` without a batch.
            key: ``[Nk, B, kdim]``, in the same layout as the query.
            value: ``[Nk, B, vdim]``, in the same layout as the query.
            key_padding_mask: ``[B, Nk]`` or ``[Nk]``. Bool, True for keys to ignore, or floating point, added to the
                scores.
            need_weights: True returns a dense weight matrix. With a sparse pattern it can have at most 2^24 elements
                (``B * H * Nq * Nk``). "block_sparse" returns only the kept tiles and does not support dropout.
            attn_mask: ``[Nq, Nk]`` or ``[B * H, Nq, Nk]``. Bool, True for pairs to ignore, or floating point with only
                0 and -inf. Any floating-point values are allowed if the pattern is None.
            average_attn_weights: Average the weights over the heads.
            is_causal: Keep only keys at or before the query's position. With ``attn_mask``, a hint that the mask is
                causal.

        Returns:
            The output, in the layout of the query, and the weights, or None without ``need_weights``.

            Dense weights are ``[B, Nq, Nk]``, or ``[B, H, Nq, Nk]`` without ``average_attn_weights``. Unbatched inputs
            have no B. They include dropout, as in PyTorch, and one extra column each for ``add_bias_kv`` and
            ``add_zero_attn``.

            Block-sparse weights are a sparse COO tensor ``[B, (H,) rows, columns, 128, 128]``. Its values are the tiles
            ``[T, 128, 128]``, cut at multiples of 128 in positions.

        Raises ValueError if shapes or dtypes are invalid, the weights are too large, ``is_causal`` comes without a mask
        and Nq != Nk, or a floating-point mask holds values other than 0 and -inf with a sparse pattern.
        """
        refuse_unknown(options, nn.MultiheadAttention.forward, "SparseMultiheadAttention")
        given = _Given(query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)
        for name, x in zip(given._fields[:3], given, strict=False):
            if not isinstance(x, Tensor):
                raise ValueError(f"{name}: expected a tensor, got {type(x).__name__}")
        if query.is_nested or key.is_nested or value.is_nested:
            return self._forward_nested(given)
        batch = self._check(given)
        # PyTorch's function needs a mask for is_causal, and returns no tiles.
        if self._is_dense and (attn_mask is not None or not is_causal) and need_weights != "block_sparse":
            return self._forward_dense(given)

        how = self._how(given, batch)
        q, k, v = (self._split_heads(x) for x in self._project(query, key, value))
        extra = self._extra_keys(q)
        if key_padding_mask is not None:
            q, k = self._padded(q, k, key_padding_mask, how)
        weights: Tensor | None = None
        if need_weights == "block_sparse":
            out, weights = self._attend_with_tiles(q, k, v, how, average_attn_weights)
        elif need_weights:
            out, weights = self._attend_with_weights(q, k, v, extra, how)
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            out = self._attend(q, k, v, extra, how)

        out = F.linear(out.transpose(1, 2).flatten(2), self.out_proj.weight, self.out_proj.bias)
        if query.dim() == 2:
            return out.squeeze(0), weights if weights is None else weights[0]
        return out if self.batch_first else out.transpose(0, 1), weights

    def _check(self, given: _Given) -> int:
        """Check the arguments and return the batch size."""
        query, key, value = given[:3]
        dims = query.dim()
        if dims not in (2, 3) or key.dim() != dims or value.dim() != dims:
            raise ValueError(
                f"query, key, value: expected all three-dimensional, or two-dimensional without a batch, got "
                f"{query.shape=}, {key.shape=}, {value.shape=}"
            )
        for name, x, width in (("query", query, self.embed_dim), ("key", key, self.kdim), ("value", value, self.vdim)):
            if x.shape[-1] != width:
                raise ValueError(f"{name}: expected {width} features in the last dimension, got {x.shape=}")
        length_dim = 1 if self.batch_first and dims == 3 else 0
        batch = query.shape[1 - length_dim] if dims == 3 else 1
        if key.shape[:-1] != value.shape[:-1] or (dims == 3 and key.shape[1 - length_dim] != batch):
            raise ValueError(
                f"key, value: expected the query's batch and one length, with {self.batch_first=}, got "
                f"{query.shape=}, {key.shape=}, {value.shape=}"
            )
        n_queries, n_keys = query.shape[length_dim], key.shape[length_dim]
        _check_mask("key_padding_mask", given.key_padding_mask, [(batch, n_keys) if dims == 3 else (n_keys,)])
        _check_mask("attn_mask", given.attn_mask, [(n_queries, n_keys), (batch * self.num_heads, n_queries, n_keys)])
        if given.is_causal and given.attn_mask is None and n_queries != n_keys:
            raise ValueError(
                f"is_causal: without attn_mask it needs as many queries as keys, got {query.shape=}, {key.shape=}; "
                "pattern=Causal() aligns queries to the last keys"
            )
        need_weights, size = given.need_weights, batch * self.num_heads * n_queries * n_keys
        if not isinstance(need_weights, bool) and need_weights != "block_sparse":
            raise ValueError(f"need_weights: expected True, False or 'block_sparse', got {need_weights!r}")
        if need_weights is True and size > MAX_WEIGHTS and not self._is_dense:
            raise ValueError(
                f"need_weights: a dense weight matrix would have {size:,} elements, over {MAX_WEIGHTS:,}; use "
                f"need_weights=False, or 'block_sparse' for the kept tiles, with {query.shape=}, {key.shape=}"
            )
        if need_weights != "block_sparse":
            return batch
        if self.training and self.dropout:
            raise ValueError(f"need_weights: 'block_sparse' does not support dropout, got {self.dropout=}")
        if self.bias_k is not None or self.add_zero_attn:
            raise ValueError("need_weights: 'block_sparse' does not support add_bias_kv or add_zero_attn")
        if self.attend is not sparse_attention:
            raise ValueError(f"need_weights: 'block_sparse' needs attend=sparse_attention, got {self!r}")
        return batch

    def _forward_dense(self, given: _Given) -> tuple[Tensor, Tensor | None]:
        query, key, value = given[:3]
        how: dict[str, Any] = dict(zip(given._fields[3:], given[3:], strict=True))
        is_turned = self.batch_first and query.dim() == 3
        if is_turned:
            # Equal tensors stay one object, so that PyTorch projects them together.
            turned = {id(x): x.transpose(0, 1) for x in (query, key, value)}
            query, key, value = (turned[id(x)] for x in (query, key, value))
        how |= {name: getattr(self, name) for name in _SHARED_NAMES}
        how |= {"dropout_p": self.dropout, "use_separate_proj_weight": self.in_proj_weight is None}
        how |= {"out_proj_weight": self.out_proj.weight, "out_proj_bias": self.out_proj.bias}
        out, weights = F.multi_head_attention_forward(query, key, value, self.embed_dim, self.num_heads, **how)
        return out.transpose(0, 1) if is_turned else out, weights

    def _forward_nested(self, given: _Given) -> tuple[Tensor, Tensor | None]:
        """Compute nested tensors, which `torch.nn.TransformerEncoder` makes of padded rows in eval mode."""
        query = given.query
        if query is not given.key or query is not given.value or not self.batch_first:
            raise ValueError(f"query: a nested tensor needs query is key is value and batch_first, got {self!r}")
        if given.need_weights or given.key_padding_mask is not None or given.attn_mask is not None:
            raise ValueError("query: a nested tensor comes with need_weights=False and without masks")
        # Padded to the longest row, with the rest as padding: [3, 5] tokens are two rows of 5.
        lengths = [len(row) for row in query.unbind()]
        padded = query.to_padded_tensor(0.0)
        places = torch.arange(padded.shape[1], device=padded.device)
        padding = places >= places.new_tensor(lengths).unsqueeze(1)
        out, _ = self.forward(padded, padded, padded, padding, need_weights=False, is_causal=given.is_causal)
        rows = [row[:length] for row, length in zip(out.unbind(), lengths, strict=True)]
        return torch.nested.as_nested_tensor(rows, layout=query.layout), None

    def _how(self, given: _Given, batch: int) -> dict[str, Any]:
        """Return the options of ``attend``: the pairs that the pattern and the masks keep, and dropout."""
        rule, is_causal = self.pattern, given.is_causal
        if given.attn_mask is not None:
            mask = read_attn_mask(given.attn_mask, batch, self.num_heads, is_causal)
            is_causal = isinstance(mask, Causal)
            if not is_causal:
                rule = mask if rule is None else rule & mask
        dropout_p = self.dropout if self.training else 0.0
        return {"pattern": rule, "is_causal": is_causal, "key_mask": None, "dropout_p": dropout_p}

    def _padded(self, q: Tensor, k: Tensor, mask: Tensor, how: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Return queries and keys whose products hold the values of a padding mask, and note its keys in ``how``."""
        how["key_mask"], added = read_key_padding_mask(torch.atleast_2d(mask))
        if added is None:
            return q, k
        # The bias of a key is one more coordinate. The query's coordinate cancels the scale: with 64 dims, a bias of 3
        # is 8 * 3 in the product, and the scale of 1 / 8 leaves 3.
        how["scale"] = self.head_dim**-0.5
        bias = added.clamp(min=torch.finfo(k.dtype).min).to(k.dtype)
        bias = bias[:, None, :, None].expand(-1, self.num_heads, -1, -1)
        q = torch.cat([q, q.new_full((*q.shape[:3], 1), math.sqrt(self.head_dim))], -1)
        return q, torch.cat([k, bias], -1)

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project query, key and value, with one matmul per distinct tensor."""
        weight, bias, width = self.in_proj_weight, self.in_proj_bias, self.embed_dim
        if weight is not None and query is key and key is value:
            q, k, v = F.linear(query, weight, bias).chunk(3, -1)
            return q, k, v
        # Cross-attention to a memory: one matmul for keys and values, which are the last two thirds of the rows.
        if weight is not None and key is value:
            q_weight, kv_weight = weight.split([width, 2 * width])
            q_bias, kv_bias = (None, None) if bias is None else bias.split([width, 2 * width])
            k, v = F.linear(key, kv_weight, kv_bias).chunk(2, -1)
            return F.linear(query, q_weight, q_bias), k, v
        weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight) if weight is None else weight.chunk(3)
        biases = (None, None, None) if bias is None else bias.chunk(3)
        q, k, v = map(F.linear, (query, key, value), weights, biases)
        return q, k, v

    def _split_heads(self, x: Tensor) -> Tensor:
        """Reshape a projection to ``[B, H, N, D]``."""
        x = x.unflatten(-1, (self.num_heads, self.head_dim))
        if x.dim() == 3:
            return x.transpose(0, 1).unsqueeze(0)
        return x.transpose(1, 2) if self.batch_first else x.permute(1, 2, 0, 3)

    def _extra_keys(self, q: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return scores ``[B, H, Nq, X]`` and values ``[1, H, X, D]`` of the X keys that every query keeps, if any."""
        of_head = (1, self.num_heads, 1, self.head_dim)
        pairs: list[tuple[Tensor, Tensor]] = []
        if self.bias_k is not None and self.bias_v is not None:
            pairs.append((self.bias_k.view(of_head).to(q.dtype), self.bias_v.view(of_head).to(q.dtype)))
        if self.add_zero_attn:
            pairs.append((q.new_zeros(of_head), q.new_zeros(of_head)))
        if not pairs:
            return None
        keys, values = (torch.cat(x, 2) for x in zip(*pairs, strict=True))
        return (q * self.head_dim**-0.5) @ keys.mT, values

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, extra: tuple[Tensor, Tensor] | None, how: dict[str, Any]
    ) -> Tensor:
        """Compute attention over the kept keys and the extra ones, which neither pattern nor padding removes."""
        if extra is None:
            kept: Tensor = self.attend(q, k, v, **how)
            return kept
        out, lse = self.attend(q, k, v, **how, return_lse=True)
        scores = extra[0].to(lse.dtype)
        # Dropout applies after the joint softmax. The merge is linear in the outputs, so it can come first.
        weights = F.dropout(scores.softmax(-1), how["dropout_p"])
        # The extra keys are one more part of the softmax, merged by its log-sum-exp as blocks are.
        extra_out = (weights.to(v.dtype) @ extra[1]).to(out.dtype)
        return merge_attention([out, extra_out], [lse, scores.logsumexp(-1)])[0]

    def _attend_with_weights(
        self, q: Tensor, k: Tensor, v: Tensor, extra: tuple[Tensor, Tensor] | None, how: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """Compute attention and its weights ``[B, H, Nq, Nk + X]``."""
        (batch, heads, n_keys, width), n_extra = v.shape, 0 if extra is None else extra[1].shape[2]
        # Attention is linear in the value, so the identity matrix as value returns the weights.
        unit = torch.eye(n_keys + n_extra, dtype=v.dtype, device=v.device).expand(batch, heads, -1, -1)
        v = torch.cat([v, unit[:, :, :n_keys]], -1)
        if extra is not None:
            extra = extra[0], torch.cat([extra[1].expand(batch, -1, -1, -1), unit[:, :, n_keys:]], -1)
        out, weights = self._attend(q, k, v, extra, how).split([width, n_keys + n_extra], -1)
        return out, weights

    def _attend_with_tiles(
        self, q: Tensor, k: Tensor, v: Tensor, how: dict[str, Any], average_attn_weights: bool
    ) -> tuple[Tensor, Tensor]:
        out, lse = sparse_attention(q, k, v, **how, return_lse=True)
        (rule,) = rules_of(sparse_attention, how["pattern"], how["is_causal"])
        index = build_index(rule, q.shape[2], k.shape[2], num_heads=q.shape[1], batch=len(q), device=q.device)
        options = {"key_mask": how["key_mask"], "scale": self.head_dim**-0.5, "average": average_attn_weights}
        return out, tile_weights(q, k, lse, index, **options)


def _check_mask(name: str, mask: Tensor | None, shapes: list[tuple[int, ...]]) -> None:
    if mask is None:
        return
    check_plain(name, mask)
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(f"{name}: expected bool or a floating dtype, got {mask.dtype=}")
    if mask.shape not in shapes:
        raise ValueError(f"{name}: expected shape {' or '.join(map(str, shapes))}, got {mask.shape=}")


def replace_attention(model: nn.Module, *, pattern: PatternLike | None, attend: Attend = sparse_attention) -> nn.Module:
    """Turn each `torch.nn.MultiheadAttention` in a model into `SparseMultiheadAttention`, in place.

    The model can be one itself. The modules keep their parameters, hooks and places in the model, so optimizers and
    checkpoints keep working. Call it again to change the pattern. It leaves other subclasses unchanged. A decoder's
    cross-attention has other lengths than its self-attention: give each its own pattern, for example
    ``replace_attention(layer.self_attn, pattern=...)``.

    Args:
        model: The module to search.
        pattern: Which pairs to keep, as in `SparseMultiheadAttention`.
        attend: Function that computes the attention, see `Attend`. Default: `sparse_attention`.

    Returns the model. Raises ValueError if the model has no attention to replace, or the pattern is defined for another
    number of heads.

    >>> from ringtile.patterns import Window
    >>> layer = nn.TransformerEncoderLayer(64, 4, batch_first=True)
    >>> replace_attention(layer, pattern=Window(128)).self_attn.pattern
    window(128)
    """
    kinds = (nn.MultiheadAttention, SparseMultiheadAttention)
    found = [module for module in model.modules() if isinstance(module, kinds) and type(module) in kinds]
    if not found:
        advice = ""
        if any(hasattr(module, "set_attn_implementation") for module in model.modules()):
            advice = "; for a model of transformers, call ringtile.integrations.transformers.use_ringtile"
        raise ValueError(
            f"model: expected a torch.nn.MultiheadAttention in it, got {type(model).__name__} without one{advice}"
        )
    # All are checked before one is changed, so an error leaves the model as it was.
    more = signature(nn.MultiheadAttention).parameters.keys() - signature(SparseMultiheadAttention).parameters
    for module in found:
        options = {name: getattr(module, name, None) for name in more}
        refuse_unknown(options, nn.MultiheadAttention, "SparseMultiheadAttention")
    rules = [checked_rule(pattern, attend, module.num_heads) for module in found]
    for module, rule in zip(found, rules, strict=True):
        # The class changes in place: another module would lose hooks, and places that share this one.
        module.__class__ = SparseMultiheadAttention
        assert isinstance(module, SparseMultiheadAttention)
        module._set_rule(rule, attend)
    return model
