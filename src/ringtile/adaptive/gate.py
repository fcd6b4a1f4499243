"""Scores of tiles that learn from exact attention, and start as scores that learn nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ringtile.adaptive.audit import audit
from ringtile.adaptive.budgets import Budget, Density
from ringtile.adaptive.choice import Choice, forced_tiles
from ringtile.adaptive.scores import Pooled, summarized
from ringtile.adaptive.view import View, grouped_products
from ringtile.patterns import Pattern
from ringtile.patterns.checks import check_positive

_BIAS = -1.5
"""Standard deviations below which a place of a new code is 0: 7% of the places are above."""
_TILES = 64
"""Tiles of keys whose codes exist at once."""


class Coded(NamedTuple):
    """The codes that a `Gate` scores by."""

    of_query: Tensor
    """``[B, H, Nq, places]``: the codes of queries, with weights."""
    of_tile: Tensor
    """``[B, Hkv, C, places]``: the codes of tiles."""


class Gate(nn.Module, Pooled):
    """Scores of `Blend`, and the learned products of sparse codes of queries and of keys.

    The code of a token is ``relu(x W + b)`` of its normalized query or key, and the code of a tile is the largest value
    of its keys in each place. A negative b leaves few places above 0, so that a tile remembers each of its keys, which
    a mean of keys does not. Both maps start equal, and the weights of the products start at 0: a new gate has the
    scores of ``Blend(pool)``. Train it with `distill`, or in the loop with `RoutedAttention`. Each layer needs a gate
    of its own: ``SparseTransformer(attend=[...])``.

    Args:
        num_heads: Number of query heads, H.
        head_dim: D.
        num_kv_heads: Number of key heads, a divisor of ``num_heads``. Default: ``num_heads``.
        places: Length of a code.
        pool: See `Blend`. Only None is causal-safe.
        device: Device of the parameters, which are float32.

    Raises:
        ValueError: If an argument is out of range, or if a call's heads or head dim do not match.

    Example:
        >>> from ringtile.adaptive import AdaptiveAttention
        >>> attend = AdaptiveAttention(Gate(4, 16), Density(0.25), block=32)
        >>> q, k, v = torch.randn(3, 1, 4, 256, 16)
        >>> attend(q, k, v, is_causal=True).shape
        torch.Size([1, 4, 256, 16])
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        num_kv_heads: int | None = None,
        places: int = 128,
        pool: Literal["max", "mean"] | None = "max",
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_positive(num_heads=num_heads, head_dim=head_dim, num_kv_heads=num_kv_heads, places=places)
        if num_heads % num_kv_heads:
            raise ValueError(f"num_kv_heads: expected a divisor of num_heads, got {num_kv_heads=}, {num_heads=}")
        self.num_heads, self.num_kv_heads, self.head_dim, self.pool = num_heads, num_kv_heads, head_dim, pool
        self.__post_init__()
        of_key = torch.randn(num_kv_heads, head_dim, places, device=device) * head_dim**-0.5
        # Both maps start equal, so a query's code meets that of an equal key.
        of_query = of_key.repeat_interleave(num_heads // num_kv_heads, 0)
        self.of_query, self.of_key = nn.Parameter(of_query), nn.Parameter(of_key)
        self.query_bias = nn.Parameter(torch.full((num_heads, 1, places), _BIAS, device=device))
        self.key_bias = nn.Parameter(torch.full((num_kv_heads, 1, places), _BIAS, device=device))
        self.weight = nn.Parameter(torch.zeros(num_heads, 1, places, device=device))

    def extra_repr(self) -> str:
        places = self.weight.shape[2]
        return f"{self.num_heads}, {self.head_dim}, num_kv_heads={self.num_kv_heads}, {places=}, pool={self.pool!r}"

    def coded(self, view: View, *, trains_queries: bool = True) -> Coded:
        """Return the codes of the queries and of the tiles of keys.

        Without ``trains_queries`` the codes of queries record no gradient, which needs the memory of the queries.
        Raises ValueError if the heads or the head dim do not match.
        """
        query, key = view.query, view.key
        if query.shape[1::2] != (self.num_heads, self.head_dim) or key.shape[1] != self.num_kv_heads:
            raise ValueError(
                f"query, key: expected {self.num_heads} and {self.num_kv_heads} heads of {self.head_dim}, got "
                f"{query.shape=} and {key.shape=}"
            )
        with torch.set_grad_enabled(trains_queries and torch.is_grad_enabled()):
            of_query = self.codes_of_queries(query)
        return Coded(of_query, self.codes_of_tiles(key, view.base.block, view.key_mask))

    def codes_of_queries(self, query: Tensor) -> Tensor:
        """Return the codes of queries, with weights, ``[B, H, Nq, places]``."""
        return self._code(query, self.of_query, self.query_bias) * self.weight

    def codes_of_tiles(self, key: Tensor, block: int, key_mask: Tensor | None = None) -> Tensor:
        """Return the codes of the tiles of keys ``[B, Hkv, C, places]``."""
        shown = None if key_mask is None else key_mask[:, None, :, None]
        if shown is not None:
            # A masked key may hold NaN, which a factor of 0 would keep.
            key = key.masked_fill(~shown, 0)
        found: list[Tensor] = []
        for part in key.split(block * _TILES, 2):
            code = self._code(part, self.of_key, self.key_bias)
            if shown is not None:
                code = code * shown[:, :, len(found) * block * _TILES :][:, :, : part.shape[2]]
            padding = -part.shape[2] % block
            found.append(F.pad(code, (0, 0, 0, padding)).unflatten(2, (-1, block)).amax(3))
        return torch.cat(found, 2)

    def _code(self, x: Tensor, of_x: Tensor, bias: Tensor) -> Tensor:
        return (F.rms_norm(x.to(of_x.dtype), (self.head_dim,)) @ of_x + bias).relu()

    def forward(self, view: View) -> Tensor:
        """Return the scores, see `Scores`. They have no gradient: `loss` does."""
        with torch.no_grad():
            return self.scored(view, self.coded(view))

    def scored(self, view: View, coded: Coded) -> Tensor:
        """Return the scores of a call from the codes of its tokens. They have no gradient."""
        tiles = view.summaries
        with torch.no_grad():
            of_query, of_tile = coded.of_query.float(), coded.of_tile.float()
            high, low = (torch.cat(((tiles.mean + side) / 2, of_tile), 3) for side in (tiles.high, tiles.low))
            wide = torch.cat((view.query.float(), of_query * self.head_dim**0.5), 3)
            return summarized(replace(view, query=wide, scale=view.factor, known=tiles), high, low, self.pool)

    def loss(self, view: View, rows: Tensor, *, first: int = 1, local: int = 1, coded: Coded | None = None) -> Tensor:
        """Return the KL divergence of the gate from exact attention to the tiles it chooses from, a mean over rows.

        Each row counts as much as the attention that it gives to tiles that are not forced. Only the parameters of the
        gate get a gradient. The cost is that of as many queries of dense attention.

        Args:
            view: The queries and keys of the call, and the index of the pairs to choose from.
            rows: int64 ``[n]``, the queries to compute exactly, counted from 0.
            first: See `Choice`.
            local: See `Choice`.
            coded: The codes of this view, with gradients of the tiles. Default: computed here.
        """
        # A detached view shares the summaries of the call, which were computed for its choice.
        view = view.detached
        base, tiles, part = view.base, view.summaries, view.query[:, :, rows]
        if coded is None:
            coded = self.coded(replace(view, query=part))
        elif coded.of_query.requires_grad:
            coded = coded._replace(of_query=coded.of_query[:, :, rows])
        else:
            # The codes of all queries recorded no gradient, to save memory: the few rows of the loss record theirs.
            coded = coded._replace(of_query=self.codes_of_queries(part))
        of_query, of_tile = coded
        row = base.row_of(rows)
        choice = (base.tiles & ~forced_tiles(base, first, local))[:, :, row] & tiles.log_count.isfinite().unsqueeze(2)
        exact = view.exact_weights(rows).sum(4).masked_fill(~choice, 0)
        # Blend is halfway from q . mean to the sum of max(q high, q low). That maximum is q (high + low) / 2 +
        # |q| (high - low) / 2, so the score is two products: q = -2 in the box [1, 5] has -6 + 4 = -2.
        middle = (tiles.mean + (tiles.high + tiles.low) / 2) / 2
        width = (tiles.high - tiles.low) / 4
        part = part.to(of_query.dtype)
        sides = ((part, middle), (part.abs(), width), (of_query * self.head_dim**0.5, of_tile))
        products = [grouped_products(x, side.to(x.dtype)) for x, side in sides]
        logits = (products[0] + products[1] + products[2]) * view.factor
        logits = (logits + tiles.log_count.unsqueeze(2)).masked_fill(~choice, -1e9)
        entropy: Tensor = torch.special.entr(exact).sum(3) - torch.special.entr(exact.sum(3))
        return -(entropy + (exact * logits.log_softmax(3)).sum(3)).mean()


class Distilled(NamedTuple):
    """What `distill` found."""

    gate: Gate
    """The gate that was passed, with the parameters that keep most of the held-out attention."""
    step: int
    """The step of these parameters, 0 if no step was better than the start."""
    recall: float
    """Mean part of the held-out attention that the returned gate keeps."""
    untrained: float
    """The same of the gate as it was passed."""
    history: tuple[tuple[int, float], ...]
    """Steps, and the held-out recall at each."""


def distill(
    gate: Gate,
    samples: Sequence[tuple[Tensor, Tensor]],
    held_out: Sequence[tuple[Tensor, Tensor]],
    *,
    budget: Budget = Density(0.25),  # noqa: B008
    base: Pattern | None = None,
    is_causal: bool = False,
    block: int = 128,
    first: int = 1,
    local: int = 1,
    scale: float | None = None,
    rows: int = 128,
    steps: int = 400,
    learning_rate: float = 1e-2,
    weight_decay: float = 0.1,
    every: int = 20,
    patience: int = 5,
    seed: int = 0,
) -> Distilled:
    """Train a gate on exact attention of drawn rows, and keep it only if it keeps more of other text's attention.

    A gate overfits: it can keep more of its own text and less of any other. So ``held_out`` decides, both when to stop
    and whether the gate stays as it was passed. Use other texts there, not other parts of the same ones.

    Args:
        gate: Gate to train, in place.
        samples: Queries ``[B, H, N, D]`` and keys ``[B, Hkv, N, D]`` of one layer, after positions were applied, for
            several texts.
        held_out: The same for texts that the samples do not contain.
        budget: The budget at which held-out recall is measured.
        base: The pairs to choose from. Default: all pairs.
        is_causal: Choose only from keys at or before the query's position.
        block, first, local: See `Choice`.
        scale: Factor for the products. Default: ``D ** -0.5``.
        rows: Number of queries to compute exactly, in each step and of each held-out sample.
        steps: Largest number of steps, one sample each.
        learning_rate: Step size of AdamW.
        weight_decay: Weight decay of AdamW. It pulls the gate towards weights of 0, the untrained scores.
        every: Number of steps between two measurements.
        patience: Number of measurements without a gain after which training ends.
        seed: Seed of the draws.

    Raises:
        ValueError: If a number is not positive, there are no samples, or a held-out tensor is one of the samples.

    Example:
        >>> texts = torch.randn(3, 2, 1, 4, 256, 16, generator=torch.Generator().manual_seed(0))
        >>> found = distill(Gate(4, 16), list(texts[:2]), [texts[2]], is_causal=True, block=16, steps=20)
        >>> found.recall >= found.untrained
        True
    """
    check_positive(rows=rows, steps=steps, every=every, patience=patience)
    if not samples or not held_out:
        raise ValueError(f"samples, held_out: expected at least one of each, got {len(samples)} and {len(held_out)}")
    # Views of one tensor at other offsets pass: whether texts overlap is yours to know.
    if {x.data_ptr() for pair in samples for x in pair} & {x.data_ptr() for pair in held_out for x in pair}:
        raise ValueError("held_out: expected other texts than the samples, got the same tensor in both")
    choice, generator = Choice(gate, budget, block, first, local), torch.Generator().manual_seed(seed)
    view = partial(choice.view, base=base, is_causal=is_causal, scale=scale)

    def recall() -> float:
        found = [
            audit(query, key, key, choice.index(view(query, key)), rows=rows, seed=seed, scale=scale).mean
            for query, key in held_out
        ]
        return sum(found) / len(found)

    def state() -> dict[str, Tensor]:
        return {name: x.clone() for name, x in gate.state_dict().items()}

    optimizer = torch.optim.AdamW(gate.parameters(), learning_rate, weight_decay=weight_decay)
    with torch.no_grad():
        best = untrained = recall()
    at, kept, history = 0, state(), [(0, best)]
    for step in range(1, steps + 1):
        query, key = samples[(step - 1) % len(samples)]
        drawn = torch.randperm(query.shape[2], generator=generator)[:rows].sort().values.to(query.device)
        optimizer.zero_grad()
        gate.loss(view(query, key), drawn, first=first, local=local).backward()
        optimizer.step()
        if step % every and step != steps:
            continue
        with torch.no_grad():
            history.append((step, recall()))
        if history[-1][1] > best:
            (at, best), kept = history[-1], state()
        elif step - at >= patience * every:
            break
    gate.load_state_dict(kept)
    return Distilled(gate, at, best, untrained, tuple(history))
