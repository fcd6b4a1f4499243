"""Give each head of a model the density that it needs, from one forward pass over one text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ringtile.adaptive import scores as _scores
from ringtile.adaptive.budgets import Density, counts_at, first_sums, ranked
from ringtile.adaptive.choice import forced_tiles
from ringtile.adaptive.scores import Scores
from ringtile.adaptive.selection import AdaptiveAttention
from ringtile.adaptive.view import View, tiles_at_once

GRID = (0.0, 0.03, 0.05, 0.07, 0.1, 0.13, 0.16, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Densities at which losses are measured."""

_UNIT = 0.07
"""Density whose mean losses are the units of the two losses."""

_LOSSES = {"recall+error": ("missed", "error"), "recall": ("missed",), "error": ("error",)}
"""The losses that each objective adds up."""

_FORMAT = 1


class LossCurves(NamedTuple):
    """What the heads of one layer lose at each density of `GRID`, on audited rows."""

    tiles: Tensor
    """float64 ``[G]``: the realized tile density, which forced tiles and rounding raise."""
    missed: Tensor
    """float64 ``[H, G]``: the mean part of the attention that is dropped."""
    error: Tensor
    """float64 ``[H, G]``: the mean squared error of the layer's output, over its mean square."""


def loss_curves(
    view: View,
    value: Tensor,
    scores: Scores,
    rows: Tensor,
    *,
    weights: Tensor | None = None,
    output: Tensor | None = None,
    first: int = 1,
    local: int = 1,
) -> LossCurves:
    """Measure what each head of a layer loses at each density of `GRID`, by exact attention of some rows.

    Args:
        view: The queries and keys of the layer, and the index of the pairs that exact attention keeps.
        value: ``[B, Hkv, Nk, Dv]``.
        scores: Which tiles are best.
        rows: int64 ``[n]``, the audited queries, counted from 0.
        weights: ``[n]``, their weights. Default: equal ones.
        output: ``[E, H * Dv]``, the layer's output projection. Default: none, and errors are of each head's output.
        first: See `Choice`.
        local: See `Choice`.

    Raises:
        ValueError: If a row is out of range.

    Example:
        >>> from ringtile.adaptive import Probe, View
        >>> from ringtile.index import build_index
        >>> from ringtile.patterns import Causal
        >>> q, k, v = torch.randn(3, 1, 2, 512, 32, generator=torch.Generator().manual_seed(0)).unbind()
        >>> base = build_index(Causal(), 512, num_heads=2, block=32)
        >>> curves = loss_curves(View(q, k, base), v, Probe(), torch.arange(0, 512, 8))
        >>> curves.missed.shape, float(curves.missed[:, -1].max()) < 1e-6
        (torch.Size([2, 18]), True)
    """
    query, key, base, key_mask = view.query, view.key, view.base, view.key_mask
    if not rows.numel() or int(rows.min()) < 0 or int(rows.max()) >= base.n_queries:
        raise ValueError(f"rows: expected numbers of queries below {base.n_queries}, got {rows!r}")
    share = torch.ones(len(rows), dtype=torch.float64) if weights is None else weights.double()
    share = (share / share.sum()).to(query.device)
    heads, groups = query.shape[1], query.shape[1] // key.shape[1]
    forced, allowed = forced_tiles(base, first, local), base.tiles
    found = scores(view)

    missed = query.new_zeros(heads, len(GRID), dtype=torch.float64)
    error, norm = missed.clone(), missed.new_zeros(heads)
    values = value.masked_fill(~key_mask[:, None, :, None], 0) if key_mask is not None else value
    values = torch.nn.functional.pad(values.float(), (0, 0, 0, base.n_cols * base.block - value.shape[2]))
    values = values.unflatten(2, (base.n_cols, base.block))
    # An error e of head h changes the layer's output by O_h e, whose square is e' (O_h' O_h) e: one matrix per head.
    mix = torch.eye(value.shape[3], dtype=torch.float64, device=value.device).expand(heads, -1, -1)
    if output is not None:
        parts = output.double().unflatten(1, (heads, -1))
        mix = torch.einsum("ehd,ehf->hdf", parts, parts)
    step = tiles_at_once(query, max(key.shape[2], base.n_cols * value.shape[3]))
    for part, weight in zip(rows.split(step), share.split(step), strict=True):
        row = base.row_of(part)
        attention = view.exact_weights(part)
        grouped = attention.unflatten(1, (-1, groups))
        outs = torch.einsum("bkgrcj,bkcjd->bkgrcd", grouped, values).flatten(1, 2).double()
        some, must = allowed[:, :, row], forced[row]
        order = ranked(found[:, :, part if scores.per_token else row], some, some & must)
        count = counts_at(GRID, some, must).expand(*outs.shape[:3], -1)
        # Tiles in order of their scores, and sums of the first n of them: all densities from one pass.
        kept = first_sums(attention.sum(4).double().gather(3, order).unsqueeze(4), count).squeeze(4)
        outs = outs.gather(3, order.unsqueeze(4).expand_as(outs))
        exact = outs.sum(3)
        wrong = first_sums(outs, count) / kept.clamp(min=1e-12).unsqueeze(4) - exact.unsqueeze(3)
        seen = attention.sum((3, 4)).unsqueeze(3) > 0.5
        missed += torch.einsum("bhrg,r->hg", (1 - kept).clamp(min=0) * seen, weight) / len(query)
        error += torch.einsum("bhrgd,hde,bhrge,r->hg", wrong, mix, wrong, weight) / len(query)
        if output is None:
            norm += torch.einsum("bhrd,bhrd,r->h", exact, exact, weight) / len(query)
        else:
            whole = exact.transpose(1, 2).flatten(2) @ output.double().mT
            norm += torch.einsum("bre,bre,r->", whole, whole, weight) / len(query)
    every = counts_at(GRID, allowed, forced).sum(2).double().mean((0, 1))
    tiles = every / allowed.sum((2, 3)).double().mean().clamp(min=1)
    return LossCurves(tiles, missed, error / norm.clamp(min=1e-30).unsqueeze(1))


def allocate(
    curves: Sequence[LossCurves], density: float, objective: Literal["recall+error", "recall", "error"] = "recall+error"
) -> list[tuple[float, ...]]:
    """Return a density for each layer and head, so that their mean tile density is ``density`` and the loss is least.

    The loss is a sum over all heads of the dropped attention, the output error, or both, each divided by its mean at a
    density of 0.07. Spending goes where the loss falls most per tile: one Lagrange multiplier for all heads, over the
    lower convex hull of each curve.

    Raises:
        ValueError: If the density is not between 0 and 1, or there are no curves.

    Example:
        >>> tiles = torch.tensor(GRID, dtype=torch.float64)
        >>> loss = torch.tensor([[1.0], [0.1]]) * (1 - tiles)
        >>> allocate([LossCurves(tiles, loss, loss)], 0.5)
        [(1.0, 0.0)]
    """
    if not 0 <= density <= 1 or not curves:
        raise ValueError(f"density, curves: expected a number from 0 to 1 and some curves, got {density!r}, {curves!r}")
    if objective not in _LOSSES:
        raise ValueError(f"objective: expected 'recall+error', 'recall' or 'error', got {objective!r}")
    at = GRID.index(_UNIT)
    loss = torch.zeros(sum(len(each.missed) for each in curves), len(GRID), dtype=torch.float64)
    for name in _LOSSES[objective]:
        each = torch.cat([getattr(curve, name).cpu() for curve in curves])
        loss += each / each[:, at].mean().clamp(min=1e-30)
    tiles = torch.cat([curve.tiles.cpu().expand(len(curve.missed), -1) for curve in curves])
    hulls = [_hull(x.tolist(), y.tolist()) for x, y in zip(tiles, loss, strict=True)]
    chosen = [GRID[hull[0]] for hull in hulls]
    left = density * len(hulls) - sum(float(tiles[head, hull[0]]) for head, hull in enumerate(hulls))
    steps = []
    for head, hull in enumerate(hulls):
        for low, high in pairwise(hull):
            cost = float(tiles[head, high] - tiles[head, low])
            steps.append((float(loss[head, low] - loss[head, high]) / cost, cost, head, low, high))
    # The steps of a convex hull become flatter, so the steepest first takes each head's steps in order.
    for _, cost, head, low, high in sorted(steps, key=lambda step: (-step[0], step[2], step[3])):
        if left <= 0:
            break
        part = min(1.0, left / cost)
        chosen[head] += part * (GRID[high] - GRID[low])
        left -= part * cost
    found = iter(chosen)
    return [tuple(round(next(found), 6) for _ in curve.missed) for curve in curves]


def _hull(x: list[float], y: list[float]) -> list[int]:
    """Return the corners of the lower convex hull of a curve, while it falls."""
    corners: list[int] = []
    for number in range(len(x)):
        # A density that costs no more tiles, or saves no loss, is no corner.
        if corners and (x[number] <= x[corners[-1]] or y[number] >= y[corners[-1]]):
            continue
        # The last corner lies above the line from the one before it to this point: the hull passes below it.
        while len(corners) > 1:
            a, b = corners[-2:]
            if (y[b] - y[a]) * (x[number] - x[a]) < (y[number] - y[a]) * (x[b] - x[a]):
                break
            corners.pop()
        corners.append(number)
    return corners


@dataclass(frozen=True)
class Calibration:
    """Loss curves of all heads of a model, and what they were measured with. It is stored as JSON.

    >>> from ringtile.adaptive import Probe
    >>> tiles = torch.tensor(GRID, dtype=torch.float64)
    >>> loss = torch.tensor([[2.0], [1.0]]) * (1 - tiles) ** 2
    >>> found = Calibration({"name": "tiny"}, Probe(), 32, 1, 1, (LossCurves(tiles, loss, loss),), {"tokens": 4096})
    >>> found.attention(0.25)[0].choice.budget
    Density(density=(0.5, 0.0))
    """

    model: Mapping[str, Any]
    """Facts that identify the model: its name, sizes and a hash of its weights."""
    scores: Scores
    block: int
    first: int
    local: int
    curves: tuple[LossCurves, ...]
    """One per layer."""
    text: Mapping[str, Any] = field(default_factory=dict)
    """Facts of the calibration text: tokens, repeat, audited rows, seed, hash."""

    def attention(self, density: float, **options: Any) -> list[AdaptiveAttention]:
        """Return a module per layer, at a mean tile density over all heads. ``options`` go to `AdaptiveAttention`."""
        return [
            AdaptiveAttention(
                self.scores, Density(of_heads), block=self.block, first=self.first, local=self.local, **options
            )
            for of_heads in allocate(self.curves, density)
        ]

    def check(self, model: Mapping[str, Any]) -> None:
        """Raise ValueError if these facts are of another model."""
        for name in sorted(self.model.keys() | model.keys()):
            if self.model.get(name) != model.get(name):
                raise ValueError(
                    f"calibration: it is of a model with {name}={self.model.get(name)!r}, got {model.get(name)!r}"
                )

    def save(self, path: str | Path) -> None:
        """Write the file whole or not at all."""
        record = {
            "format": _FORMAT,
            "model": dict(self.model),
            "scores": _as_record(self.scores),
            "block": self.block,
            "forced": {"first": self.first, "local": self.local},
            "calibration": dict(self.text),
            "grid": GRID,
            "curves": [{name: x.tolist() for name, x in curve._asdict().items()} for curve in self.curves],
        }
        path = Path(path)
        # A reader must never see half a file, so it is renamed into place.
        draft = path.with_name(path.name + ".part")
        draft.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        draft.replace(path)

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """Read a file of `save`. Raises ValueError if it is none."""
        try:
            record = json.loads(Path(path).read_text(encoding="utf-8"))
            if record["format"] != _FORMAT or tuple(record["grid"]) != GRID:
                raise ValueError(f"format {record['format']!r} with a grid of {len(record['grid'])} densities")
            curves = tuple(
                LossCurves(**{name: torch.tensor(curve[name], dtype=torch.float64) for name in LossCurves._fields})
                for curve in record["curves"]
            )
            forced = record["forced"]
            return cls(
                record["model"],
                _from_record(record["scores"]),
                record["block"],
                forced["first"],
                forced["local"],
                curves,
                record["calibration"],
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"calibration: expected a file of Calibration.save in {str(path)!r}: {error}") from None


def _as_record(scores: Scores) -> dict[str, Any]:
    name = type(scores).__name__
    if isinstance(scores, _scores.Sum):
        return {"name": name, "parts": [_as_record(part) for part in scores.parts]}
    if not is_dataclass(scores) or getattr(_scores, name, None) is not type(scores):
        raise ValueError(f"scores: expected those of ringtile.adaptive, whose settings can be stored, got {scores!r}")
    return {"name": name, **asdict(scores)}


def _from_record(record: dict[str, Any]) -> Scores:
    settings = dict(record)
    kind = getattr(_scores, settings.pop("name"), None)
    if not (isinstance(kind, type) and issubclass(kind, Scores)):
        raise ValueError(f"unknown scores {record['name']!r}")
    if kind is _scores.Sum:
        return _scores.Sum(*map(_from_record, settings["parts"]))
    return kind(**settings)
