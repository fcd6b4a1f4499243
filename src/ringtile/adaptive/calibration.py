"""One threshold for all heads of a model, from one forward pass over one text."""

from __future__ import annotations

import bisect
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringtile.adaptive import scores as _scores
from ringtile.adaptive.budgets import Density, Gain, gains_of
from ringtile.adaptive.choice import forced_tiles
from ringtile.adaptive.control import Controller
from ringtile.adaptive.scores import Scores
from ringtile.adaptive.selection import AdaptiveAttention
from ringtile.adaptive.view import View, tiles_at_once

GRID = (0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.13, 0.16, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 1.0)
"""Tile densities whose thresholds a calibration keeps."""

_DENSITY = Density(0.07)
"""The budget at which heads are compared."""
_WEIGHTS = 0.2, 6.0
"""The least and the largest cost of a head, in units of the mean."""
_FORMAT = 5


class HeadFacts(NamedTuple):
    """What one forward pass says about the heads of a layer by some scores."""

    missed: Tensor
    """float64 ``[H]``: the mean part of the attention that a density of 0.07 drops."""
    error: Tensor
    """float64 ``[H]``: the mean squared error of the layer's output by it, over its mean square."""
    scores: Tensor
    """float32 ``[H, n]``: the gains (`Gain`) of the tiles that are allowed and not forced."""
    allowed: int
    """Number of tiles that each head may keep."""


def head_facts(
    view: View,
    value: Tensor,
    scores: Scores,
    rows: Tensor,
    *,
    weights: Tensor | None = None,
    output: Tensor | None = None,
    first: int = 1,
    local: int = 1,
) -> HeadFacts:
    """Measure what each head of a layer loses by sparse attention, by exact attention of some rows.

    Args:
        view: The queries and keys of the layer, and the index of the pairs that exact attention keeps.
        value: ``[B, Hkv, Nk, Dv]``.
        scores: Which tiles are best.
        rows: int64 ``[n]``, the audited queries, counted from 0.
        weights: ``[n]``, their weights. Default: equal ones.
        output: ``[E, H * Dv]``, the layer's output projection. Default: none, and errors are of each head's output.
        first, local: See `Choice`.

    Raises ValueError if a row is out of range, or scores are per token.

    >>> from ringtile.adaptive import Probe, View
    >>> from ringtile.index import build_index
    >>> from ringtile.patterns import Causal
    >>> q, k, v = torch.randn(3, 1, 2, 512, 32, generator=torch.Generator().manual_seed(0)).unbind()
    >>> facts = head_facts(View(q, k, build_index(Causal(), 512, block=16)), v, Probe(), torch.arange(0, 512, 8))
    >>> facts.missed.shape, facts.scores.shape
    (torch.Size([2]), torch.Size([2, 435]))
    """
    query, key, base, key_mask = view.query, view.key, view.base, view.key_mask
    if not rows.numel() or int(rows.min()) < 0 or int(rows.max()) >= base.n_queries:
        raise ValueError(f"rows: expected numbers of queries below {base.n_queries}, got {rows!r}")
    if scores.per_token:
        raise ValueError(f"scores: expected scores of tiles, got {scores!r}, which are per token")
    share = torch.ones_like(rows, dtype=torch.float64) if weights is None else weights.double()
    share = (share / share.sum()).to(query.device)
    batch, heads = query.shape[:2]
    forced, found = forced_tiles(base, first, local), scores(view)
    allowed = base.tiles.expand(batch, heads, -1, -1)
    keep = _DENSITY.keep(found, allowed, forced)
    values = value.masked_fill(~key_mask[:, None, :, None], 0) if key_mask is not None else value
    values = torch.nn.functional.pad(values.double(), (0, 0, 0, base.n_cols * base.block - value.shape[2]))
    values = values.repeat_interleave(heads // key.shape[1], 1)
    # An error e of head h changes the layer's output by O_h e, whose square is e' (O_h' O_h) e: one matrix per head.
    mix = torch.eye(value.shape[3], dtype=torch.float64, device=value.device).expand(heads, -1, -1)
    if output is not None:
        parts = output.double().unflatten(1, (heads, -1))
        mix = torch.einsum("ehd,ehf->hdf", parts, parts)
    missed = query.new_zeros(heads, dtype=torch.float64)
    error, norm = missed.clone(), missed.clone()
    step = tiles_at_once(query, key.shape[2])
    for part, weight in zip(rows.split(step), share.split(step), strict=True):
        exact = view.exact_weights(part).double()
        kept = exact * keep[:, :, base.row_of(part)].unsqueeze(4)
        mass = kept.sum((3, 4))
        outs, some = (x.flatten(3) @ values for x in (exact, kept))
        wrong = some / mass.clamp(min=1e-12).unsqueeze(3) - outs
        missed += torch.einsum("bhr,r->h", (1 - mass).clamp(min=0) * (exact.sum((3, 4)) > 0.5), weight) / batch
        error += torch.einsum("bhrd,hde,bhre,r->h", wrong, mix, wrong, weight) / batch
        if output is None:
            norm += torch.einsum("bhrd,bhrd,r->h", outs, outs, weight) / batch
        else:
            norm += (outs.transpose(1, 2).flatten(2) @ output.double().mT).square().sum(2).mean(0) @ weight
    free = (allowed & ~forced).any(0).any(0)
    listed = gains_of(found, allowed, forced)[:, :, free].mean(0)
    return HeadFacts(missed, error / norm.clamp(min=1e-30), listed, int(allowed[0, 0].sum()))


def head_weights(layers: Sequence[HeadFacts]) -> list[Tensor]:
    """Return the weight of each head by what a unit of dropped attention costs in it, float32 ``[H]`` per layer."""
    missed, error = (torch.cat([getattr(layer, name) for layer in layers]).cpu() for name in ("missed", "error"))
    cost = 1 / missed.mean().clamp(min=1e-12) + error / missed.clamp(min=1e-3) / error.mean().clamp(min=1e-30)
    # The root of a cost weighs a score. A gain is the root of one, so its weight is a root of that.
    weights = (cost / cost.mean()).clamp(*_WEIGHTS).pow(0.25).float()
    return list(weights.split([len(layer.missed) for layer in layers]))


@dataclass(frozen=True)
class Calibration:
    """The weights of all heads of a model, and the thresholds of tile densities. It is stored as JSON.

    A tile is kept if its gain (`Gain`), times the weight of its head, is at least one number for the whole model. So
    heads and rows get as many tiles as they need, and nothing is counted in a call.

    Args:
        model: Facts that identify the model: its name, sizes and a hash of its weights.
        scores: Which tiles are best.
        block: Tile side in tokens.
        first, local: See `Choice`.
        weights: One tuple per layer, with one weight per head.
        thresholds: The number for each density of `GRID`, descending.
        text: Facts of the calibration text: tokens, repeat, audited rows, seed, hash.

    >>> from ringtile.adaptive import Probe
    >>> numbers = tuple(1 - density for density in GRID)
    >>> found = Calibration({"name": "tiny"}, Probe(), 16, 1, 1, ((2.0, 0.5),), numbers)
    >>> found.threshold(0.2), found.attention(0.2)[0].choice.budget
    (0.8, Gain(least=(0.4, 1.6)))
    """

    model: Mapping[str, Any]
    scores: Scores
    block: int
    first: int
    local: int
    weights: tuple[tuple[float, ...], ...]
    thresholds: tuple[float, ...]
    text: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        layers: Sequence[HeadFacts],
        model: Mapping[str, Any],
        scores: Scores,
        *,
        block: int = 16,
        first: int = 1,
        local: int = 1,
        text: Mapping[str, Any] | None = None,
    ) -> Calibration:
        """Return the calibration of a model from the facts of its layers, see `head_facts`."""
        weights = head_weights(layers)
        scored = [
            (layer.scores * each.unsqueeze(1).to(layer.scores.device)).flatten().cpu()
            for layer, each in zip(layers, weights, strict=True)
        ]
        descending = torch.cat(scored).sort(descending=True).values
        tiles = sum(layer.allowed * len(layer.missed) for layer in layers)
        forced = tiles - len(descending)
        # Of 1000 tiles, 200 of them forced, a density of 0.3 keeps the 100 others with the highest gains.
        places = [round(density * tiles) - forced - 1 for density in GRID]
        numbers = [math.inf if place < 0 else float(descending[place]) for place in places[:-1]]
        of_heads = tuple(tuple(each.tolist()) for each in weights)
        return cls(model, scores, block, first, local, of_heads, (*numbers, 0.0), text or {})

    def threshold(self, density: float) -> float:
        """Return the number that keeps a tile density of the calibration text, as a mean over all heads.

        Raises ValueError if the density is not above 0 and at most 1.
        """
        if not 0 < density <= 1:
            raise ValueError(f"density: expected a number above 0 and at most 1, got {density!r}")
        at = min(max(bisect.bisect_left(GRID, density), 1), len(GRID) - 1)
        (low, high), (more, less) = GRID[at - 1 : at + 1], self.thresholds[at - 1 : at + 1]
        share = (density - low) / (high - low)
        if density in GRID or more == math.inf:
            return less if density == high else more
        # Thresholds fall by powers, so their logarithms are interpolated. Above the last density but one they reach 0.
        return more * (less / more) ** share if less > 0 else more * (1 - share)

    def attention(
        self, density: float | None = None, *, quality: float | None = None, **options: Any
    ) -> list[AdaptiveAttention]:
        """Return a module per layer, at a mean tile density or at a quality that a `Controller` holds in each call.

        ``options`` go to `AdaptiveAttention`. Raises ValueError unless one of the two is given.
        """
        if (density is None) == (quality is None):
            raise ValueError(f"density, quality: expected one of them, got {density=}, {quality=}")
        how: dict[str, Any] = {"block": self.block, "first": self.first, "local": self.local, **options}
        if quality is not None:
            # A controller keeps what it has seen, so each layer has its own.
            return [AdaptiveAttention(self.scores, Controller(quality), **how) for _ in self.weights]
        assert density is not None
        number = self.threshold(density)
        budgets = [Gain(tuple(number / weight for weight in of_layer)) for of_layer in self.weights]
        return [AdaptiveAttention(self.scores, budget, **how) for budget in budgets]

    def check(self, model: Mapping[str, Any]) -> None:
        """Raise ValueError if these facts are of another model."""
        for name in sorted(self.model.keys() | model.keys()):
            if self.model.get(name) != model.get(name):
                raise ValueError(
                    f"calibration: it is of a model with {name}={self.model.get(name)!r}, got {model.get(name)!r}"
                )

    def save(self, path: str | Path) -> None:
        """Write the file whole or not at all."""
        record = {"format": _FORMAT, **asdict(self), "scores": _as_record(self.scores), "grid": GRID}
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
            if record.pop("format") != _FORMAT or tuple(record.pop("grid")) != GRID:
                raise ValueError("another format or grid")
            record["scores"] = _from_record(record["scores"])
            record["weights"], record["thresholds"] = tuple(map(tuple, record["weights"])), tuple(record["thresholds"])
            return cls(**record)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"calibration: expected a file of Calibration.save in {str(path)!r}: {error}") from None


def _as_record(scores: Scores) -> dict[str, Any]:
    name = type(scores).__name__
    if isinstance(scores, _scores.Sum):
        return {"name": name, "parts": [_as_record(part) for part in scores.parts], "weights": scores.weights}
    if not is_dataclass(scores) or getattr(_scores, name, None) is not type(scores):
        raise ValueError(f"scores: expected those of ringtile.adaptive, whose settings can be stored, got {scores!r}")
    return {"name": name, **asdict(scores)}


def _from_record(record: dict[str, Any]) -> Scores:
    settings = dict(record)
    kind = getattr(_scores, settings.pop("name"), None)
    if not (isinstance(kind, type) and issubclass(kind, Scores)):
        raise ValueError(f"unknown scores {record['name']!r}")
    if kind is _scores.Sum:
        return _scores.Sum(*map(_from_record, settings["parts"]), weights=settings["weights"])
    return kind(**settings)
