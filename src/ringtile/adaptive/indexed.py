"""Attention over the keys that a small indexer, which learns from the layer's attention, chooses for each query."""

from typing import Any

import torch
from torch import Tensor, nn

from ringtile.adaptive.indexer import index_topk
from ringtile.adaptive.losses import index_loss
from ringtile.functional import sparse_attention
from ringtile.functional.attend import rules_of
from ringtile.functional.attention import checked_tensors
from ringtile.functional.cache import LayerCache
from ringtile.patterns import Chosen, Pattern
from ringtile.patterns.checks import check_positive


class IndexedAttention(nn.Module):
    """Attention over ``keys`` keys per query that an indexer chooses, as ``attend=`` of a module of a dense decoder.

    The indexer is linear. It maps the layer's own queries and keys, after positions, to one vector of ``dim`` for each
    key-value head, whose query heads choose together. The maps are random until the first call that learns: this sets
    them to the products of rank ``dim`` that are closest to the mean of the layer's.

    A call in training keeps `loss`, see `index_loss`, of some drawn queries. Add those of all layers to your loss, or
    train by them alone: only the indexers get a gradient of it. First set ``warm_up`` to True: attention is dense, and
    the indexer learns from all keys. Then set it to False: attention is sparse, and it learns from the chosen ones.

    A query chooses by itself and by keys that it may see: training leaks nothing, and generation makes the same choice.

    Args:
        num_heads: Number of query heads, H.
        head_dim: D.
        keys: Number of keys of each query. In a causal model these are about ``2 * keys / N`` of the pairs of N tokens.
        num_kv_heads: Number of key heads, a divisor of ``num_heads``. Default: ``num_heads``.
        dim: Length of the indexer's vectors.
        first: Number of first keys among ``keys`` that are always kept.
        local: Number of latest keys among them that are always kept.
        rows: Number of drawn queries of a call in training, whose exact attention the loss costs.
        device: Device of the parameters, which are float32.

    Raises ValueError if an argument is out of range, or if a call's heads, head dim or pattern do not match.

    >>> from ringtile import SparseTransformer
    >>> attend = [IndexedAttention(4, 16, keys=32, dim=8, first=2, local=8) for _ in range(2)]
    >>> model = SparseTransformer(2, 64, 4, is_causal=True, attend=attend)
    >>> out = model(torch.randn(1, 200, 64))
    >>> (out.square().mean() + sum(each.loss for each in attend)).backward()
    """

    steps = True
    """Calls of one query choose, too."""
    started: Tensor

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        keys: int = 256,
        *,
        num_kv_heads: int | None = None,
        dim: int = 32,
        first: int = 4,
        local: int = 16,
        rows: int = 128,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_positive(num_heads=num_heads, head_dim=head_dim, num_kv_heads=num_kv_heads, dim=dim, rows=rows)
        if num_heads % num_kv_heads:
            raise ValueError(f"num_kv_heads: expected a divisor of num_heads, got {num_kv_heads=}, {num_heads=}")
        if dim > head_dim:
            raise ValueError(f"dim: expected at most {head_dim=}, got {dim}")
        if min(first, local) < 0 or first + local >= keys:
            raise ValueError(f"keys: expected more than first + local, got {keys=}, {first=}, {local=}")
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.keys, self.first, self.local, self.rows, self.warm_up = keys, first, local, rows, False
        self._loss: Tensor | None = None
        shared = num_heads // num_kv_heads
        maps = nn.init.orthogonal_(torch.empty(head_dim, dim, device=device)).repeat(num_kv_heads, 1, 1)
        self.of_query = nn.Parameter(maps.repeat(1, shared, 1) * (head_dim**-0.5 / shared))
        self.of_key = nn.Parameter(maps)
        self.query_bias = nn.Parameter(torch.zeros(num_kv_heads, 1, dim, device=device))
        self.register_buffer("started", torch.tensor(False, device=device))

    def extra_repr(self) -> str:
        return f"{self.num_heads}, {self.head_dim}, {self.keys}, num_kv_heads={self.num_kv_heads}"

    @property
    def loss(self) -> Tensor:
        """The `index_loss` of the last call in training.

        Raises RuntimeError if that call recorded no gradient, as inside gradient checkpointing.
        """
        if self._loss is None:
            raise RuntimeError(
                "loss: the last call recorded no gradient; call the model in training mode, without checkpointing"
            )
        return self._loss

    @torch.no_grad()
    def start(self, query: Tensor, key: Tensor, scale: float | None = None) -> None:
        """Set the maps to the products of rank ``dim`` that are closest to those of some queries and keys."""
        q, k = (x.transpose(0, 1).flatten(1, 2) for x in self._joined(query, key))
        factor = self.head_dim**-0.5 if scale is None else scale
        mean = torch.eye(self.head_dim, device=q.device, dtype=q.dtype).repeat(q.shape[2] // self.head_dim, 1)
        mean *= factor * self.head_dim / q.shape[2]
        roots = []
        for x in (q, k - k.mean(1, keepdim=True)):
            values, vectors = torch.linalg.eigh(x.mT @ x / x.shape[1])
            roots.append((vectors * values.clamp(min=0).sqrt().unsqueeze(1)) @ vectors.mT)
        # With roots A and B of the second moments, maps whose product is M are off by |A (M - mean) B|.
        u, s, vh = torch.linalg.svd(roots[0] @ mean @ roots[1], full_matrices=False)
        dim = self.of_key.shape[2]
        part = s[:, None, :dim].clamp(min=torch.finfo(s.dtype).tiny).rsqrt()
        self.of_query.copy_(mean @ roots[1] @ vh[:, :dim].mT * part)
        self.of_key.copy_(mean.mT @ roots[0] @ u[:, :, :dim] * part)
        self.query_bias.zero_()
        self.started.fill_(True)

    def index(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return the indexer's queries ``[B, Hkv, Nq, dim]`` and keys ``[B, Hkv, Nk, dim]``."""
        with torch.autocast(query.device.type, enabled=False):
            q, k = self._joined(query, key)
            return q @ self.of_query + self.query_bias, k @ self.of_key

    def _joined(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return the queries of each key-value head side by side, ``[B, Hkv, Nq, H / Hkv * D]``, and the keys."""
        shared = query.to(self.of_query.dtype).unflatten(1, (self.num_kv_heads, -1))
        return shared.transpose(2, 3).flatten(3), key.to(self.of_key.dtype)

    def new_cache(self, rule: Pattern) -> LayerCache:
        """Return an empty cache for generation over the pairs of a rule. It holds all keys."""
        return _IndexedCache(self, rule)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        pattern: Pattern | None = None,
        *,
        is_causal: bool = False,
        key_mask: Tensor | None = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        **options: Any,
    ) -> Any:
        """Compute the attention as `sparse_attention` does, over the chosen keys among those of the pattern."""
        # A call that does not learn must not leave the loss of an earlier one to be added again.
        self._loss = None
        if taken := {"key_lengths", "start"} & options.keys():
            raise ValueError(f"{sorted(taken)[0]}: an indexer takes a key_mask and queries at the end instead")
        if not isinstance(pattern, Pattern | None):
            raise ValueError(f"pattern: expected a Pattern or None, got {pattern!r}")
        query, key, value = checked_tensors(query, key, value, enable_gqa)
        if (*query.shape[1::2], key.shape[1]) != (self.num_heads, self.head_dim, self.num_kv_heads):
            raise ValueError(
                f"query, key: expected {self.num_heads} and {self.num_kv_heads} heads of {self.head_dim}, got "
                f"{query.shape=} and {key.shape=}"
            )
        (rule,) = rules_of(sparse_attention, pattern, is_causal)
        how: dict[str, Any] = {"groups": self.num_kv_heads, "pattern": rule, "key_mask": key_mask}
        n_queries, n_keys, indices = query.shape[2], key.shape[2], None
        learns = self.training and torch.is_grad_enabled()
        if learns and not self.started:
            self.start(query, key, scale)
        if not self.warm_up and self.keys < n_keys:
            with torch.no_grad():
                found = index_topk(*self.index(query, key), self.keys - self.first, local=self.local, **how)
                first = torch.arange(self.first, dtype=found.dtype, device=found.device)
                indices = torch.cat((first.expand(*found.shape[:3], -1), found), 3)
        if learns:
            row = torch.randperm(n_queries, device=query.device)[: self.rows]
            drawn, lists = query.detach()[:, :, row], None if indices is None else indices[:, :, row]
            start = (row + n_keys - n_queries).expand(len(query), -1)
            how |= {"indices": lists, "start": start, "scale": scale}
            self._loss = index_loss(*self.index(drawn, key.detach()), drawn, key, **how)
        options |= {"key_mask": key_mask, "scale": scale, "enable_gqa": enable_gqa}
        return sparse_attention(query, key, value, rule if indices is None else Chosen(indices) & rule, **options)


class _IndexedCache(LayerCache):
    """All keys and values of a layer, and the calls of its indexer over them."""

    def __init__(self, compute: IndexedAttention, pattern: Pattern) -> None:
        super().__init__(pattern)
        # A later token may choose any key, so nothing is dropped, even if the pattern bounds how far it looks.
        self.capacity = None
        self._compute = compute

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
        """Compute attention of the next N tokens, as `LayerCache.attend` does, over the chosen keys."""
        seen, mask = self._extended(query, key, value, key_mask)
        out: Tensor = self._compute(query, seen.key, seen.value, self.pattern, key_mask=mask, enable_gqa=True)
        return out
