"""Attention over the keys that a small indexer, which learns from the layer's attention, chooses for each query."""

import math
from collections.abc import Callable, Iterable
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ringtile.adaptive.indexer import index_topk
from ringtile.adaptive.losses import index_loss
from ringtile.functional import sparse_attention
from ringtile.functional.attend import rules_of
from ringtile.functional.attention import check_options, checked_tensors
from ringtile.functional.cache import LayerCache
from ringtile.kernels.contracts import scale_of
from ringtile.patterns import Chosen, Pattern
from ringtile.patterns.checks import check_positive
from ringtile.patterns.grammar import as_rule

_SCORES = 1 << 20
"""Most scores of measured queries at once: about ten tensors of them are alive."""


class IndexedAttention(nn.Module):
    """Attention over ``keys`` keys per query that an indexer chooses, as ``attend=`` of a module of a dense decoder.

    The indexer is linear. It maps the layer's own queries and keys, after positions, to one vector of ``dim`` for each
    key-value head, whose query heads choose together. The maps are random until the first call that learns: this sets
    them to the products of rank ``dim`` that are closest to the mean of the layer's.

    A call in training keeps `loss`, see `index_loss`, of some drawn queries. Add those of all layers to your loss, or
    train by them alone: only the indexers get a gradient of it. First set ``warm_up`` to True: in training, attention
    is dense, and the indexer learns from all keys. Then set it to False: attention is sparse, and it learns from the
    chosen ones. Out of training, attention is sparse.

    A query chooses by itself and by keys that it may see: training leaks nothing, and generation makes the same choice.

    Args:
        num_heads: Number of query heads, H.
        head_dim: D.
        keys: Number of keys of each query, or a tuple with that of each key-value head, as `share_keys` sets it. In a
            causal model these are about ``2 * keys / N`` of the pairs of N tokens. A ``state_dict`` holds them.
        num_kv_heads: Number of key heads, a divisor of ``num_heads``. Default: ``num_heads``.
        dim: Length of the indexer's vectors.
        first: Number of first keys among ``keys`` that are always kept.
        local: Number of latest keys among them that are always kept.
        rows: Number of drawn queries of a call in training, whose exact attention the loss costs. `share_keys` measures
            at as many.
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
        keys: int | tuple[int, ...] = 256,
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
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.first, self.local, self.rows, self.warm_up = first, local, rows, False
        self.keys = keys
        self._loss: Tensor | None = None
        self._measured: tuple[Tensor, Tensor] | None = None
        shared = num_heads // num_kv_heads
        # Drawn in float32: PyTorch has no orthogonal matrices in low precision.
        maps = nn.init.orthogonal_(torch.empty(head_dim, dim, dtype=torch.float32, device=device))
        maps = maps.to(torch.get_default_dtype()).repeat(num_kv_heads, 1, 1)
        self.of_query = nn.Parameter(maps.repeat(1, shared, 1) * (head_dim**-0.5 / shared))
        self.of_key = nn.Parameter(maps)
        self.query_bias = nn.Parameter(maps.new_zeros(num_kv_heads, 1, dim))
        self.register_buffer("started", maps.new_zeros((), dtype=torch.bool))

    def extra_repr(self) -> str:
        return f"{self.num_heads}, {self.head_dim}, {self.keys}, num_kv_heads={self.num_kv_heads}"

    @property
    def keys(self) -> int | tuple[int, ...]:
        """Number of keys of each query, the same for all key-value heads or one for each. It can change at any time."""
        return self._keys

    @keys.setter
    def keys(self, keys: int | tuple[int, ...]) -> None:
        each = keys if isinstance(keys, tuple) else (keys,) * self.num_kv_heads
        first, local, heads = self.first, self.local, self.num_kv_heads
        if min(first, local) < 0 or len(each) != heads or any(type(x) is not int or x <= first + local for x in each):
            said = "an int, or a tuple with that of each key-value head, of more than first + local"
            raise ValueError(f"keys: expected {said}, got {keys=} with {first=}, {local=}, num_kv_heads={heads}")
        self._keys, self._keys_of_heads = keys, each

    def get_extra_state(self) -> Tensor:
        """Return the numbers of keys, for a ``state_dict``."""
        return torch.tensor(self.keys, dtype=torch.int64, device="cpu")

    def set_extra_state(self, state: Tensor) -> None:
        """Set the numbers of keys."""
        self.keys = tuple(state.tolist()) if state.dim() else int(state)

    def __getstate__(self) -> dict[str, Any]:
        # Copies and files hold no graph, so they hold no loss.
        return self.__dict__ | {"_loss": None}

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
        factor = scale_of(query, scale)
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

    def _best(
        self, query: Tensor, key: Tensor, n: int, rule: Pattern, key_mask: Tensor | None, start: Tensor | None = None
    ) -> Tensor:
        """Return the best keys of the indexer's queries besides the first ones: the latest, then by score."""
        others = (torch.arange(key.shape[2], device=key.device) >= self.first).expand(len(key), -1)
        others = others if key_mask is None else others & key_mask
        return index_topk(
            query,
            key,
            n,
            groups=key.shape[1],
            local=self.local,
            pattern=rule,
            key_mask=others,
            start=start,
        )

    @torch.no_grad()
    def _measure(
        self, query: Tensor, key: Tensor, rule: Pattern, key_mask: Tensor | None, scale: float | None, *sums: Tensor
    ) -> None:
        """Add some queries to sums by count of keys: the lost attention of each head, the pairs of one, queries."""
        n, total = sums
        n_queries, n_keys, shared = query.shape[2], key.shape[2], self.num_heads // self.num_kv_heads
        # Evenly spaced, and so the same in all layers: a draw would add its noise to their differences.
        rows = min(self.rows, n_queries)
        row = (2 * torch.arange(rows, device=query.device) + 1) * n_queries // (2 * rows)
        query, at = query[:, :, row], row + n_keys - n_queries
        small_query, small_key = self.index(query, key)
        dtype = torch.promote_types(small_key.dtype, torch.float32)
        factor = scale_of(query, scale)
        zero, j = torch.zeros((), dtype=torch.int64, device=row.device), torch.arange(n_keys, device=row.device)
        chunks = torch.arange(len(row), device=row.device).split(max(1, _SCORES // (shared * n_keys)))
        for b, part in product(range(len(query)), chunks):
            of_row, mask = rule.batch_row(b), None if key_mask is None else key_mask[b : b + 1]
            keep = of_row.allowed(zero, at[part, None], j).expand(len(part), n_keys)
            keep = keep if mask is None else keep & mask
            # A query is padded if its own key is.
            real = keep.any(1) if mask is None or n_queries > n_keys else keep.any(1) & mask[0, at[part]]
            part, keep = part[real], keep[real]
            for head in range(self.num_kv_heads):
                q, k = query[b, head * shared : (head + 1) * shared, part].to(dtype), key[b, head].to(dtype)
                with torch.autocast(q.device.type, enabled=False):
                    p = (q @ k.mT * factor).masked_fill_(~keep, -math.inf).softmax(2).mean(0)
                of_head = small_query[b : b + 1, head : head + 1, part], small_key[b : b + 1, head : head + 1]
                order = self._best(*of_head, n_keys, of_row, mask, at[part].unsqueeze(0))[0, 0].long()
                p = p.gather(1, order.clamp(min=0)).masked_fill_(order < 0, 0)
                # Summed from the end, since what many keys lose is no difference of numbers near 1.
                lost = pad(p.flip(1).cumsum(1).flip(1), (0, 1))[:, (n - self.first).clamp(max=n_keys)]
                total[head] += lost.sum(0).cpu()
            total[-2] += torch.minimum(keep.sum(1, keepdim=True), n).sum(0).cpu()
            total[-1] += len(part)

    def new_cache(self, rule: Pattern) -> LayerCache:
        """Return an empty cache for generation over the pairs of a rule. It holds all keys."""
        return _IndexedCache(self, rule)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        pattern: Pattern | str | None = None,
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
        pattern = None if pattern is None else as_rule(pattern)
        query, key, value = checked_tensors(query, key, value, enable_gqa)
        check_options(query, key, key_mask=key_mask, scale=scale)
        if (*query.shape[1::2], key.shape[1]) != (self.num_heads, self.head_dim, self.num_kv_heads):
            raise ValueError(
                f"query, key: expected {self.num_heads} and {self.num_kv_heads} heads of {self.head_dim}, got "
                f"{query.shape=} and {key.shape=}"
            )
        (rule,) = rules_of(sparse_attention, pattern, is_causal)
        n_queries, n_keys, indices = query.shape[2], key.shape[2], None
        learns, warms_up = self.training and torch.is_grad_enabled(), self.training and self.warm_up
        if (learns or self._measured) and not self.started:
            self.start(query, key, scale)
        if self._measured:
            self._measure(query, key, rule, key_mask, scale, *self._measured)
        elif not warms_up and min(self._keys_of_heads) < n_keys:
            with torch.no_grad():
                most = min(max(self._keys_of_heads), n_keys) - self.first
                found = self._best(*self.index(query, key), most, rule, key_mask)
                for head, count in enumerate(self._keys_of_heads):
                    found[:, head, :, count - self.first :] = -1
                first = torch.arange(self.first, dtype=found.dtype, device=found.device)
                indices = torch.cat((first.expand(*found.shape[:3], -1), found), 3)
        if learns:
            row = torch.randperm(n_queries, device=query.device)[: self.rows]
            drawn, lists = query.detach()[:, :, row], None if indices is None else indices[:, :, row]
            start = (row + n_keys - n_queries).expand(len(query), -1)
            self._loss = index_loss(
                *self.index(drawn, key.detach()),
                drawn,
                key,
                groups=self.num_kv_heads,
                indices=lists,
                pattern=rule,
                start=start,
                key_mask=key_mask,
                scale=scale,
            )
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


def share_keys(attends: Iterable[IndexedAttention], keys: int, run: Callable[[], object]) -> None:
    """Set the ``keys`` of indexers by need: as many pairs as with ``keys`` keys everywhere, where they lose the least.

    Call it after training. ``run`` calls the model on text as long as what you serve. Meanwhile attention is dense, and
    each module measures at ``rows`` queries what part of the attention each number of keys loses, the mean over the
    query heads of a key-value head. Keys are shared out among all key-value heads so that the sum of the square roots
    of the lost parts is least. Each gets between an eighth and four times ``keys``. Padded tokens do not count, and a
    query counts no more keys than it may see. A module that did not learn yet starts here.

    Raises ValueError if ``attends`` are no modules, if ``keys`` is not more than ``first + local``, or if ``run`` does
    not call each module. Then all keep their keys.

    >>> from ringtile import SparseTransformer
    >>> attend = [IndexedAttention(4, 16, dim=8, first=2, local=8) for _ in range(2)]
    >>> model = SparseTransformer(2, 64, 4, is_causal=True, attend=attend)
    >>> share_keys(attend, 32, lambda: model(torch.randn(1, 200, 64)))
    >>> len(attend[0].keys)
    4
    """
    modules = list(attends)
    if not modules or not all(isinstance(each, IndexedAttention) for each in modules):
        raise ValueError(f"attends: expected IndexedAttention modules, got {modules}")
    least = max(each.first + each.local for each in modules) + 1
    if type(keys) is not int or keys < least:
        raise ValueError(f"keys: expected more than first + local, at least {least}, got {keys!r}")
    counts = sorted({max(least, round(keys * 2 ** (i / 4))) for i in range(-12, 9)})
    found = [torch.zeros(each.num_kv_heads + 2, len(counts), dtype=torch.float64, device="cpu") for each in modules]
    try:
        for each, sums in zip(modules, found, strict=True):
            each._measured = each.of_key.new_tensor(counts, dtype=torch.int64), sums
        with torch.no_grad():
            run()
    finally:
        for each in modules:
            each._measured = None
    for number, sums in enumerate(found):
        if not sums[-1, 0]:
            raise ValueError(f"run: expected a call of each module with tokens, got none of attends[{number}]")
    means = [sums / sums[-1] for sums in found]
    roots = torch.cat([each[:-2] for each in means]).sqrt()
    pairs = torch.cat([each[-2].expand(len(each) - 2, -1) for each in means])
    level = pairs.new_zeros(len(pairs), 1, dtype=torch.int64)
    left = (pairs[:, counts.index(keys)] - pairs[:, 0]).sum()
    while True:
        # The step that gains the most per pair, however far it leads, of those that fit.
        cost = pairs - pairs.gather(1, level)
        gain = ((roots.gather(1, level) - roots) / cost).where((cost > 0) & (cost <= left), 0)
        head, count = divmod(int(gain.argmax()), len(counts))
        if gain[head, count] <= 0:
            break
        left -= cost[head, count]
        level[head] = count
    for each, levels in zip(modules, level.squeeze(1).split([each.num_kv_heads for each in modules]), strict=True):
        each.keys = tuple(counts[i] for i in levels)
