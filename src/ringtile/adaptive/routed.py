"""Attention that learns in training which tiles to attend to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Unpack

import torch
from torch import Tensor

from ringtile.adaptive.budgets import Budget, Density
from ringtile.adaptive.choice import ChoiceOptions
from ringtile.adaptive.gate import Coded, Gate
from ringtile.adaptive.scores import Scores
from ringtile.adaptive.selection import AdaptiveAttention
from ringtile.adaptive.view import View
from ringtile.functional import sparse_attention
from ringtile.patterns.checks import check_positive


def with_coordinates(query: Tensor, key: Tensor, of_query: Tensor, of_key: Tensor) -> tuple[Tensor, Tensor]:
    """Return queries and keys that add a router's scores to the logits, with value 0 and with their gradient.

    The product of the results is ``q . k + gq . gk - gq . gk``, and the last term is a constant for autograd. Attention
    needs the ``scale=`` of the original head dim.

    Args:
        query: ``[B, H, Nq, D]``.
        key: ``[B, Hkv, Nk, D]``.
        of_query: ``[B, H, Nq, r]``, the router's coordinates of each query.
        of_key: ``[B, Hkv, Nk, r]``, its coordinates of each key: equal inside a tile.

    Returns:
        ``[B, H, Nq, D + 2 r]`` and ``[B, Hkv, Nk, D + 2 r]``.
    """
    of_query, of_key = of_query.to(query.dtype), of_key.to(key.dtype)
    return (
        torch.cat((query, of_query, -of_query.detach()), 3),
        torch.cat((key, of_key, of_key.detach()), 3),
    )


class _Coding(Scores):
    """The scores of a gate, which keep what they are made of for the gradients."""

    coded: Coded

    def __init__(self, gate: Gate, trains_queries: bool) -> None:
        self.gate, self.trains_queries = gate, trains_queries
        self.causal_safe, self.per_token = gate.causal_safe, gate.per_token

    def __repr__(self) -> str:
        return repr(self.gate)

    def __call__(self, view: View) -> Tensor:
        # A choice runs without gradients, and the codes in it are those that the loss differentiates.
        with torch.enable_grad():
            self.coded = self.gate.coded(view, trains_queries=self.trains_queries)
        return self.gate.scored(view, self.coded)


class RoutedAttention(AdaptiveAttention):
    """`AdaptiveAttention` whose `Gate` learns while the model trains, from the first step on.

    In training, a call computes the attention of a few drawn queries exactly, and `loss` compares the gate with it,
    over tiles that are kept and others. Add it to the loss of your model. It reaches the gate alone, and the output is
    exact attention over the chosen tiles.

    Args:
        gate: The scores. A causal model needs ``Gate(..., pool=None)``, which looks at no later token.
        budget: See `Choice`.
        rows: Number of queries per call whose attention is computed exactly. The cost is that of as many queries of
            dense attention.
        straight_through: Also give the gate the gradient of your model's loss, as if its scores were added to the
            logits, see `with_coordinates`. It judges kept tiles only, adds twice the gate's places to the head dim, and
            the output differs by rounding.
        **options: ``block``, ``first``, ``local``, ``last_dense``, ``min_length`` and ``allow_future``, see `Choice`.

    Raises:
        ValueError: If ``gate`` is no `Gate`, ``rows`` is not positive, or as `select`, when called.

    Example:
        >>> from ringtile import SparseTransformer
        >>> attend = [RoutedAttention(Gate(4, 16, pool=None), block=16) for _ in range(2)]
        >>> model = SparseTransformer(2, 64, 4, is_causal=True, attend=attend)
        >>> out = model(torch.randn(1, 256, 64))
        >>> (out.square().mean() + sum(each.loss for each in attend)).backward()
        >>> bool(attend[0].scores.weight.grad.abs().max() > 0)
        True
    """

    scores: Gate

    def __init__(
        self,
        gate: Gate,
        budget: Budget = Density(0.25),  # noqa: B008
        *,
        rows: int = 16,
        straight_through: bool = False,
        **options: Unpack[ChoiceOptions],
    ) -> None:
        if not isinstance(gate, Gate):
            raise ValueError(f"gate: expected a Gate, got {gate!r}")
        check_positive(rows=rows)
        super().__init__(gate, budget, **options)
        self.rows, self.straight_through = rows, straight_through
        self._loss: Tensor | None = None

    @property
    def loss(self) -> Tensor:
        """The `Gate.loss` of the last call in training, to add to the model's loss.

        Raises RuntimeError if that call recorded no gradient, as inside gradient checkpointing.
        """
        if self._loss is None:
            raise RuntimeError(
                "loss: the last call recorded no gradient; call the model in training mode, without checkpointing"
            )
        return self._loss

    def forward(self, *tensors: Any, **options: Any) -> Any:
        """Compute the attention as `AdaptiveAttention` does. In training, record the gradients of the gate, too."""
        # A call that does not learn must not leave the loss of an earlier one to be added again.
        self._loss = None
        return super().forward(*tensors, **options)

    def _of_view(self, view: View, value: Tensor, **options: Any) -> Any:
        query, key, choice = view.query, view.key, self.choice
        learns = self.training and torch.is_grad_enabled() and key.shape[2] >= choice.min_length
        if not learns or not query.numel():
            return super()._of_view(view, value, **options)
        coding = _Coding(self.scores, self.straight_through)
        index = replace(choice, scores=coding).index(view)
        drawn = torch.randperm(query.shape[2], device=query.device)[: self.rows]
        self._loss = self.scores.loss(view, drawn, first=choice.first, local=choice.local, coded=coding.coded)
        options |= {"key_mask": view.key_mask, "scale": view.scale}
        if self.straight_through:
            of_key = coding.coded.of_tile.repeat_interleave(view.base.block, 2)[:, :, : key.shape[2]]
            query, key = with_coordinates(query, key, coding.coded.of_query * query.shape[3] ** 0.5, of_key)
            # The head dim has grown, and the scale is that of the original one.
            options["scale"] = view.factor
        return sparse_attention(query, key, value, index, **options)
