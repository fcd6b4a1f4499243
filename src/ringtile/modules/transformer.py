"""Transformer layers with sparse attention, and a stack of them: encoder or decoder, with a cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial, reduce
from operator import or_
from typing import Any, TypedDict, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ringtile.functional import sparse_attention
from ringtile.functional.attend import Attend, cache_of, checked_rule, holds_state, rules_of
from ringtile.functional.attention import PatternLike, check_plain
from ringtile.functional.cache import LayerCache
from ringtile.modules.positions import rotary_angles, rotate
from ringtile.modules.recompute import recomputed
from ringtile.patterns import Pattern
from ringtile.patterns.checks import check_number, check_positive

Angles = tuple[Tensor, Tensor]


class LayerOptions(TypedDict, total=False):
    """The options of every layer of a stack, see `SparseTransformerLayer`."""

    num_kv_heads: int | None
    hidden_dim: int | None
    dropout: float
    rotary: bool
    qk_norm: bool
    is_causal: bool
    device: torch.device | str | None
    dtype: torch.dtype | None


class SparseTransformerLayer(nn.Module):
    """A pre-norm transformer layer: attention, then an MLP with GELU, each after an RMSNorm. Linear maps have no bias.

    The two output matrices start at zero, so a new layer is the identity and depth does not slow the first steps of
    training.

    Args:
        embed_dim: Model width, a multiple of ``num_heads``.
        num_heads: Number of query heads.
        num_kv_heads: Number of key and value heads, a divisor of ``num_heads`` (GQA). Default: ``num_heads``.
        hidden_dim: Width inside the MLP. Default: ``4 * embed_dim``.
        dropout: Probability of dropping attention weights, and elements of both outputs, during training.
        rotary: Use rotary position embeddings (Su et al., arXiv:2104.09864). The head dim must be even.
        qk_norm: Scale queries and keys to a root mean square of 1 first (Henry et al., arXiv:2010.04245).
        is_causal: Keep only keys at or before the query: a decoder.
        pattern: Which pairs to keep, as in `SparseMultiheadAttention`. Default: all pairs.
        attend: Function that computes the attention, see `Attend`. It gets ``enable_gqa=True`` if ``num_kv_heads`` is
            smaller than ``num_heads``. `longnet_attend` and `in_slices` make others. Default: `sparse_attention`.
        device, dtype: Of the parameters.

    Raises ValueError if an argument is out of range, or if the pattern is defined for a different number of heads.

    >>> from ringtile.patterns import GlobalTokens, Window
    >>> layer = SparseTransformerLayer(64, 4, is_causal=True, pattern=Window(128) | GlobalTokens(4))
    >>> layer(torch.randn(2, 300, 64)).shape
    torch.Size([2, 300, 64])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        hidden_dim: int | None = None,
        dropout: float = 0.0,
        rotary: bool = True,
        qk_norm: bool = False,
        is_causal: bool = False,
        pattern: PatternLike | None = None,
        attend: Attend = sparse_attention,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        hidden_dim = 4 * embed_dim if hidden_dim is None else hidden_dim
        check_positive(embed_dim=embed_dim, num_heads=num_heads, num_kv_heads=num_kv_heads, hidden_dim=hidden_dim)
        if embed_dim % num_heads or (rotary and embed_dim // num_heads % 2):
            wanted = "an even multiple" if rotary else "a multiple"
            raise ValueError(f"embed_dim: expected {wanted} of num_heads, got {embed_dim=}, {num_heads=}, {rotary=}")
        if num_heads % num_kv_heads:
            raise ValueError(f"num_kv_heads: expected a divisor of num_heads, got {num_kv_heads=}, {num_heads=}")
        check_number("dropout", dropout, "a probability in [0, 1)", 0, 1)
        self.embed_dim, self.num_heads, self.num_kv_heads = embed_dim, num_heads, num_kv_heads
        self.head_dim = embed_dim // num_heads
        self.dropout, self.rotary, self.qk_norm, self.is_causal = dropout, rotary, qk_norm, is_causal
        self.pattern, self.attend = checked_rule(pattern, attend, num_heads), attend

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False, device=device, dtype=dtype)

        # Queries, keys and values are one matrix, so one matmul. With fewer key heads it is not square.
        self.attention_norm = nn.RMSNorm(embed_dim, device=device, dtype=dtype)
        self.qkv = linear(embed_dim, (num_heads + 2 * num_kv_heads) * self.head_dim)
        self.output = linear(embed_dim, embed_dim)
        self.mlp_norm = nn.RMSNorm(embed_dim, device=device, dtype=dtype)
        self.up, self.down = linear(embed_dim, hidden_dim), linear(hidden_dim, embed_dim)
        # Both branches add 0 to their input at first, so gradients reach all layers alike.
        nn.init.zeros_(self.output.weight)
        nn.init.zeros_(self.down.weight)

    @property
    def rule(self) -> Pattern:
        """The kept pairs: the pattern with causality, or the union of LongNet's branches."""
        return reduce(or_, rules_of(self.attend, self.pattern, self.is_causal))

    def extra_repr(self) -> str:
        parts = [f"{self.embed_dim}", f"num_heads={self.num_heads}", f"pattern={self.pattern!r}"]
        if self.num_kv_heads != self.num_heads:
            parts.append(f"num_kv_heads={self.num_kv_heads}")
        parts += [f"{name}=True" for name in ("rotary", "qk_norm", "is_causal") if getattr(self, name)]
        return ", ".join(parts + ([f"dropout={self.dropout}"] if self.dropout else []))

    def new_cache(self) -> LayerCache:
        """Return an empty cache for generation.

        Raises ValueError if the layer is not causal, or ``attend`` is neither `sparse_attention` nor made by
        `longnet_attend` or `ring_attend` nor an `AdaptiveAttention` that can decode.
        """
        return cache_of(self.attend, self.pattern, self.is_causal)

    def angles(self, x: Tensor, start: int = 0, positions: Tensor | None = None) -> Angles | None:
        """Return cosines and sines for ``x`` ``[B, N, embed_dim]``, or None if the layer is not rotary.

        The tokens start at a position, or have the int64 positions ``[N]`` or ``[B, N]``. Raises ValueError if shapes
        or dtypes do not match, if both are given, or if a layer that is not rotary gets positions.
        """
        check_plain("x", x)
        if positions is not None:
            check_plain("positions", positions)
        if x.dim() != 3 or x.shape[2] != self.embed_dim:
            raise ValueError(f"x: expected [B, N, {self.embed_dim}], got {x.shape=}")
        if positions is not None and (not self.rotary or (positions.dim() == 2 and len(positions) != len(x))):
            raise ValueError(
                f"positions: expected rotary=True and [N] or [B, N] of {x.shape=}, got {self.rotary=} and "
                f"{tuple(positions.shape)}"
            )
        if not self.rotary:
            return None
        cos, sin = rotary_angles(x.shape[1], self.head_dim, start=start, positions=positions, like=x)
        # Each batch element has angles of its own, shared by its heads.
        return (cos, sin) if cos.dim() == 2 else (cos.unsqueeze(1), sin.unsqueeze(1))

    def cached_angles(self, x: Tensor, cache: LayerCache | KVCache) -> Angles | None:
        """Return `angles` for tokens that follow the cached ones."""
        return self.angles(x, cache.length, cache.positions if self.rotary else None)

    def forward(
        self,
        x: Tensor,
        key_mask: Tensor | None = None,
        cache: LayerCache | None = None,
        angles: Angles | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Apply the layer.

        Args:
            x: ``[B, N, embed_dim]``.
            key_mask: ``[B, N]`` bool, True for tokens to attend to.
            cache: Cache from `new_cache`. ``x`` then holds the tokens after the cached ones, and the call adds them.
            angles: Result of `angles`, if several layers share it.
            positions: Position of each token for the rotary embeddings, see `SparseTransformer.forward`.

        Returns ``[B, N, embed_dim]``. Raises ValueError if shapes do not match, if the cache is from another layer or
        used in training, or if positions come with a cache or with angles.
        """
        if positions is not None and (cache is not None or angles is not None):
            raise ValueError("positions: expected neither a cache, which counts its own tokens, nor angles beside them")
        if cache is not None and cache.patterns != rules_of(self.attend, self.pattern, self.is_causal):
            raise ValueError(f"cache: expected one of the pattern {self.rule!r}, got {cache!r}")
        if cache is not None and self.training and self.dropout:
            raise ValueError(f"cache: expected a layer in eval mode, got {self.training=} with {self.dropout=}")
        if angles is None:
            angles = self.angles(x, 0, positions) if cache is None else self.cached_angles(x, cache)
        x = x + self._dropped(self.output(self._attention(self.attention_norm(x), key_mask, cache, angles)))
        return x + self._dropped(self.down(F.gelu(self.up(self.mlp_norm(x)), approximate="tanh")))

    def _attention(self, x: Tensor, key_mask: Tensor | None, cache: LayerCache | None, angles: Angles | None) -> Tensor:
        heads, kv_heads = self.num_heads, self.num_kv_heads
        projected = self.qkv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        query, key, value = projected.split([heads, kv_heads, kv_heads], 1)
        query, key = self._placed(query, angles), self._placed(key, angles)
        if cache is not None:
            mixed: Tensor = cache.attend(query, key, value, key_mask=key_mask)
        else:
            options = {"key_mask": key_mask, "dropout_p": self.dropout if self.training else 0.0}
            # A function of yours may not know the argument, so it only gets it if it has to.
            options |= {"enable_gqa": True} if heads != kv_heads else {}
            mixed = self.attend(query, key, value, pattern=self.pattern, is_causal=self.is_causal, **options)
        return mixed.transpose(1, 2).flatten(2)

    def _placed(self, x: Tensor, angles: Angles | None) -> Tensor:
        placed = F.rms_norm(x, (self.head_dim,)) if self.qk_norm else x
        if angles is not None:
            placed = rotate(placed, *angles)
        # Under autocast, a norm returns a wider dtype than the values have.
        return placed.to(x.dtype)

    def _dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)


class KVCache:
    """The caches of a stack of layers, in order. `SparseTransformer.new_cache` creates one.

    >>> from ringtile.patterns import Causal, streaming
    >>> cache = KVCache([LayerCache(streaming(4, 60)), LayerCache(Causal())])
    >>> cache.length, cache.bounded
    (0, False)
    """

    def __init__(self, layers: Iterable[LayerCache]) -> None:
        self.layers = tuple(layers)
        if not self.layers:
            raise ValueError(f"layers: expected at least one LayerCache, got {self.layers}")

    @property
    def length(self) -> int:
        """Number of tokens seen so far. Raises ValueError if the layers differ, after an interrupted call."""
        # A call that an error interrupts has reached some layers only.
        lengths = [layer.length for layer in self.layers]
        if min(lengths) < max(lengths):
            raise ValueError(f"cache: expected layers that have seen the same tokens, got {lengths}")
        return lengths[0]

    @property
    def positions(self) -> Tensor | None:
        """Positions of the next tokens if they do not follow `length`, see `LayerCache`."""
        return self.layers[0].positions

    def drawn(self, draw: Callable[[], Tensor], like: Tensor) -> Tensor:
        """Return the next tokens, see `LayerCache`."""
        return self.layers[0].drawn(draw, like)

    @property
    def bounded(self) -> bool:
        """True if the patterns of all layers bound the memory."""
        return all(layer.bounded for layer in self.layers)

    @property
    def nbytes(self) -> int:
        """Size of all layers in bytes."""
        return sum(layer.nbytes for layer in self.layers)


class SparseTransformer(nn.Module):
    """A stack of `SparseTransformerLayer` with a final RMSNorm: an encoder, or a decoder with ``is_causal``.

    Args:
        num_layers: Number of layers.
        embed_dim: Model width.
        num_heads: Number of query heads.
        pattern: Which pairs to keep, in every layer, or a list with one pattern per layer. Default: all pairs.
        attend: Function that computes the attention of every layer, or a list with one per layer. A module that learns,
            such as `ringtile.adaptive.IndexedAttention`, needs a list: each layer learns its own.
        gradient_checkpointing: Save only the input of each layer and recompute the rest in the backward pass, with the
            same dropout. This needs memory for one layer instead of all, and one more forward pass.
        **options: ``num_kv_heads``, ``hidden_dim``, ``dropout``, ``rotary``, ``qk_norm``, ``is_causal``, ``device`` and
            ``dtype``, see `SparseTransformerLayer`.

    Raises ValueError as `SparseTransformerLayer`, if a list has another length than the number of layers, or if several
    layers would share what ``attend`` learns.

    >>> from ringtile.patterns import Strided, Window
    >>> decoder = SparseTransformer(2, 64, 4, is_causal=True, pattern=[Window(64), Strided(16)])
    >>> decoder(torch.randn(1, 200, 64)).shape
    torch.Size([1, 200, 64])
    """

    def __init__(
        self,
        num_layers: int,
        embed_dim: int,
        num_heads: int,
        *,
        pattern: PatternLike | Sequence[PatternLike | None] | None = None,
        attend: Attend | Sequence[Attend] = sparse_attention,
        gradient_checkpointing: bool = False,
        **options: Unpack[LayerOptions],
    ) -> None:
        super().__init__()
        check_positive(num_layers=num_layers)
        patterns: list[Any] = _one_per_layer("pattern", pattern, num_layers)
        attends: list[Attend] = _one_per_layer("attend", attend, num_layers)
        # One module in several layers would train one set of weights, or mix the state of the layers.
        own = [id(each) for each in attends if holds_state(each)]
        if len(set(own)) < len(own):
            raise ValueError(f"attend: expected one for each of {num_layers=} layers, which would share what it learns")
        self.gradient_checkpointing = gradient_checkpointing
        self.layers = nn.ModuleList(
            SparseTransformerLayer(embed_dim, num_heads, pattern=each, attend=of_layer, **options)
            for each, of_layer in zip(patterns, attends, strict=True)
        )
        self.norm = nn.RMSNorm(embed_dim, device=options.get("device"), dtype=options.get("dtype"))

    def extra_repr(self) -> str:
        return "gradient_checkpointing=True" if self.gradient_checkpointing else ""

    def new_cache(self) -> KVCache:
        """Return an empty cache of all layers. Raises ValueError as `SparseTransformerLayer.new_cache` does."""
        layers: list[Any] = list(self.layers)
        return KVCache(layer.new_cache() for layer in layers)

    def forward(
        self, x: Tensor, key_mask: Tensor | None = None, cache: KVCache | None = None, positions: Tensor | None = None
    ) -> Tensor:
        """Apply all layers.

        Args:
            x: ``[B, N, embed_dim]``.
            key_mask: ``[B, N]`` bool, True for tokens to attend to.
            cache: Cache from `new_cache`. ``x`` then holds the tokens after the cached ones, in chunks of any length.
            positions: Position of each token for the rotary embeddings, int64 ``[N]`` or ``[B, N]``: the tokens of one
                rank, for example. The pattern is up to ``attend``, and `sparse_attention` counts tokens in the order of
                ``x``. Default: the numbers of the tokens.

        Returns ``[B, N, embed_dim]``. Raises ValueError if shapes do not match, if the cache is from another model,
        used in training or with gradients, or if positions come with a cache or to layers that are not rotary.
        """
        layers: list[Any] = list(self.layers)
        if positions is not None and cache is not None:
            raise ValueError("positions: expected none beside a cache, which counts its own tokens")
        if cache is not None and len(cache.layers) != len(layers):
            raise ValueError(f"cache: expected {len(layers)} layers, got {len(cache.layers)}")
        caches: Sequence[LayerCache | None] = [None] * len(layers) if cache is None else cache.layers
        # All layers rotate by the same angles, so they are computed once, and outside of checkpoints.
        angles = layers[0].angles(x, 0, positions) if cache is None else layers[0].cached_angles(x, cache)
        for layer, layer_cache in zip(layers, caches, strict=True):
            # A recomputed layer would add its tokens to the cache twice.
            call = partial(recomputed, layer) if self.gradient_checkpointing and layer_cache is None else layer
            x = call(x, key_mask, layer_cache, angles)
        out: Tensor = self.norm(x)
        return out


def _one_per_layer(name: str, given: Any, num_layers: int) -> list[Any]:
    found = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given] * num_layers
    if len(found) != num_layers:
        raise ValueError(f"{name}: expected one, or one for each of {num_layers=} layers, got {len(found)}")
    return found
