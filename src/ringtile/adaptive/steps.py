"""Steps of one query over growing keys: scores read a box per tile, which is made once, when the tile is complete."""

import torch
from torch import Tensor

from ringtile.adaptive.budgets import Budget
from ringtile.adaptive.cache import check_by_row
from ringtile.adaptive.choice import Choice
from ringtile.adaptive.scores import Boxes, Pooled, Scores, Sum, boxes_of
from ringtile.adaptive.view import summaries
from ringtile.functional import sparse_attention
from ringtile.functional.cache import with_room
from ringtile.index import build_index
from ringtile.kernels.contracts import scale_of
from ringtile.kernels.select import native_step
from ringtile.patterns import Dense
from ringtile.patterns.private import assert_async


class Pages:
    """The boxes of the complete tiles of growing keys, for each part of some scores. Changed keys need new pages."""

    def __init__(self, choice: Choice) -> None:
        self.block, self.parts = choice.block, _parts(choice.scores)
        self._count = 0
        self._boxes: list[Boxes] = []
        self._mask: Tensor | None = None

    def grown(self, key: Tensor, key_mask: Tensor | None = None) -> list[Boxes]:
        """Return the boxes of the complete tiles of ``[B, Hkv, Nk, D]``, after those that are new have been added."""
        had, complete = self._count, key.shape[2] // self.block
        before = had * self.block
        if had and not (self._mask is None and key_mask is None):
            old = key.new_ones(len(key), before, dtype=torch.bool) if self._mask is None else self._mask[:, :before]
            same = old.all() if key_mask is None else (old == key_mask[:, :before]).all()
            assert_async(same, "attention_mask: expected the padding that earlier steps had")
        if complete > had:
            new = slice(before, complete * self.block)
            self._mask = key_mask
            tiles = summaries(key[:, :, new], self.block, None if key_mask is None else key_mask[:, new])
            for number, (part, _) in enumerate(self.parts):
                more = boxes_of(*part.box(tiles), tiles.log_count, key.dtype)
                if not had:
                    self._boxes.append(Boxes(*(x[:, :, :0] for x in more)))
                room = Boxes(*(with_room(x, had, complete) for x in self._boxes[number]))
                for to, x in zip(room, more, strict=True):
                    to[:, :, had:complete] = x
                self._boxes[number] = room
            self._count = complete
        return [Boxes(*(x[:, :, :complete] for x in each)) for each in self._boxes]


def check_steps(choice: Choice) -> None:
    """Raise ValueError if a choice cannot decide about a step from the boxes of tiles and the step's query."""
    check_by_row(choice)
    _parts(choice.scores)


def _parts(scores: Scores) -> list[tuple[Pooled, float]]:
    """Return scores by boxes, and their shares of a sum."""
    if isinstance(scores, Sum):
        shares = [weight / sum(scores.weights) for weight in scores.weights]
        return [(x, a * b) for part, a in zip(scores.parts, shares, strict=True) for x, b in _parts(part)]
    if not isinstance(scores, Pooled) or type(scores).box is Pooled.box:
        raise ValueError(
            "scores: steps need those of each query by summaries of tiles, Blend(None), Box(None), Means(None) or a "
            f"Sum of these, got {scores!r}"
        )
    return [(scores, 1.0)]


def attend_step(
    choice: Choice,
    pages: Pages,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    key_mask: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Compute the attention ``[B, H, 1, Dv]`` of the last token over the tiles that a causal call would choose."""
    with torch.no_grad():
        keep = kept_tiles(choice, pages, query.detach(), key.detach(), key_mask, scale)
    found = native_step(query, key, value, keep, choice.block, key_mask, scale)
    if found is not None:
        return found
    # The room for all tiles spares a GPU from telling how many are kept.
    index = build_index(Dense(), 1, key.shape[2], block=choice.block, device=key.device).restricted(keep, keep.numel())
    return sparse_attention(query, key, value, index, key_mask=key_mask, scale=scale, enable_gqa=True)


def kept_tiles(
    choice: Choice, pages: Pages, query: Tensor, key: Tensor, key_mask: Tensor | None, scale: float | None
) -> Tensor:
    """Return the tiles that the last token keeps, bool ``[B, H, 1, C]``."""
    # The last token's own tile has no score: its box would know later tokens.
    own = (key.shape[2] - 1) // choice.block
    col = torch.arange(own + 1, device=key.device)
    forced = ((col < choice.first) | (col >= own - choice.local)).unsqueeze(0)
    allowed = torch.ones_like(forced)[None, None]
    if key.shape[2] < choice.min_length:
        return allowed.expand(*query.shape[:2], -1, -1)
    scale = scale_of(query, scale)
    boxes = [Boxes(*(x[:, :, :own] for x in each)) for each in pages.grown(key, key_mask)]
    found = query.new_zeros(*query.shape[:2], 1, own + 1, dtype=torch.float32)
    if own:
        for each, (_, share) in zip(boxes, pages.parts, strict=True):
            found[..., :own] += scored(query, each, scale) * share
    budget = choice.budget
    assert isinstance(budget, Budget)
    return budget.keep(found, allowed, forced)


def scored(query: Tensor, boxes: Boxes, scale: float) -> Tensor:
    """Return the scores of boxes for one query per head, float32 ``[B, H, 1, C]``. It reads nothing back from a GPU."""
    wide = torch.promote_types(query.dtype, torch.float32)
    # The heads that share keys are the rows of one product, so that boxes are read once.
    signs = torch.cat((query.relu(), (-query).relu()), 3).to(wide).squeeze(2).unflatten(1, (boxes.sides.shape[1], -1))
    logits = (signs @ boxes.sides.to(wide).mT).mul_(scale).add_(boxes.bias.unsqueeze(2))
    # A box with a NaN is hidden by its bias. A row without a box gets zeros.
    weights = logits.masked_fill_((boxes.bias == -torch.inf).unsqueeze(2), -torch.inf).softmax(3)
    found: Tensor = weights.nan_to_num_(0).flatten(1, 2).unsqueeze(2).float()
    return found
