"""The correctness check: one problem's inputs, its results in float64, and the errors that are allowed."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ringtile.kernels.native.library import reason_against
from ringtile.kernels.native.precision import arithmetic_of
from ringtile.kernels.reference import attention_rows
from ringtile.patterns import Pattern
from ringtile.tools.bench.peers import Attention, Case
from ringtile.tools.memory import Peaks, peak_memory
from ringtile.tools.record import FORWARD

CHECKED_ROWS = 32
ERROR_FACTOR = 3.0
"""A result is wrong if its error is more than this many times PyTorch's own, in the same dtype, rows and mask."""
ERROR_FLOOR, ERROR_FLOORS = 1e-6, {torch.float64: 1e-12}
"""A result with an error below this is always right."""
PARTS_FLOOR = 2e-5
"""The same where float32 is multiplied in two bfloat16 parts: twice the errors that we measured."""


def relative_error(actual: Tensor, exact: Tensor) -> float:
    """Return the relative L2 error: absolute if ``exact`` is zero, infinite if ``actual`` is not finite."""
    difference = (actual.double() - exact).norm().item()
    error = difference / (exact.norm().item() or 1.0)
    return math.inf if math.isnan(error) else error


class Exact:
    """The inputs of a case, and float64 results to compare with.

    Outputs are compared in sampled rows. The gradient of the output is zero in all other rows. The gradients of q, k
    and v, compared everywhere, are then the gradients of the sampled rows, and cost no more.
    """

    def __init__(self, case: Case, seed: int, *, trains: bool = True, checked_rows: int = CHECKED_ROWS) -> None:
        generator = torch.Generator().manual_seed(seed)
        query_shape = (case.batch, case.heads, case.queries, case.head_dim)
        key_shape = (case.batch, case.key_heads, case.n_tokens, case.head_dim)
        self.case, self.trains = case, trains
        q, k, v = (
            torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(case.device, case.dtype)
            for shape in (query_shape, key_shape, key_shape)
        )
        self.inputs = q, k, v
        rows = torch.randperm(case.queries, generator=generator, device="cpu")[: checked_rows - 2]
        self.rows = torch.cat([rows, rows.new_tensor([0, case.queries - 1])]).unique().to(case.device)
        # A case that only runs forward needs no gradients, which are as large as its queries.
        self.grad = self.rows_grad = q.new_empty(0)
        if trains:
            self.grad = torch.randn(query_shape, generator=generator, dtype=torch.float32, device="cpu").to(
                case.device, case.dtype
            )
            self.rows_grad = torch.zeros_like(self.grad)
            self.rows_grad[:, :, self.rows] = self.grad[:, :, self.rows]
        self._results: dict[Pattern, tuple[list[Tensor], list[float]]] = {}

    def errors(self, pattern: Pattern, out: Tensor, grads: Sequence[Tensor]) -> list[float]:
        """Return the relative errors of an output and, if given, of its gradients by q, k and v."""
        exact, _ = self.references(pattern)
        got = [out[:, :, self.rows], *grads]
        return [relative_error(mine, right) for mine, right in zip(got, exact[: len(got)], strict=True)]

    def bound(self, pattern: Pattern, direction: str) -> float:
        """Return the largest error that is allowed."""
        theirs = self.references(pattern)[1][: 1 if direction == FORWARD else None]
        # An infinite error would let every result pass.
        allowed = [ERROR_FACTOR * error for error in theirs if math.isfinite(error)]
        dtype, on_cpu = self.case.dtype, self.case.device.type == "cpu"
        if dtype == torch.float32 and on_cpu and not reason_against() and arithmetic_of(dtype).tile_products:
            return max(PARTS_FLOOR, *allowed, 0.0)
        return max(ERROR_FLOORS.get(dtype, ERROR_FLOOR), *allowed, 0.0)

    def references(self, pattern: Pattern) -> tuple[list[Tensor], list[float]]:
        """Return the results in float64, and the errors of PyTorch's own attention with a bool mask."""
        if pattern not in self._results:
            q, k, v = (x.detach().double().requires_grad_(self.trains) for x in self.inputs)
            out, lse = attention_rows(q, k, v, pattern, self.rows)
            exact = self._rows_of(out, (q, k, v), torch.ones_like(lse, dtype=torch.bool))
            # PyTorch computes other values for rows that keep no keys, so they do not count.
            q, k, v = (x.detach().requires_grad_(self.trains) for x in self.inputs)
            mask, gqa = self.kept(pattern, self.rows), self.case.key_heads != self.case.heads
            out = F.scaled_dot_product_attention(q[:, :, self.rows], k, v, attn_mask=mask, enable_gqa=gqa)
            theirs = self._rows_of(out, (q, k, v), lse > -torch.inf)
            errors = [relative_error(mine, right) for mine, right in zip(theirs, exact, strict=True)]
            self._results[pattern] = exact, errors
        return self._results[pattern]

    def _rows_of(self, out: Tensor, leaves: Sequence[Tensor], some: Tensor) -> list[Tensor]:
        """Return the sampled rows of an output, zero outside ``some``, and the gradients if the case trains."""
        out = torch.where(some.unsqueeze(-1), out, 0)
        if not self.trains:
            return [out]
        grad = torch.where(some.unsqueeze(-1), self.rows_grad[:, :, self.rows], 0).to(out.dtype)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

    def kept(self, pattern: Pattern, rows: Tensor) -> Tensor:
        """Return the keys that some queries keep, bool ``[B or 1, H, R, N]``."""
        heads, keys = (torch.arange(size, device=self.case.device) for size in (self.case.heads, self.case.n_tokens))
        query = rows[:, None] + self.case.n_tokens - self.case.queries
        rules = map(pattern.batch_row, range(pattern.batch_size or 1))
        kept = [rule.allowed(heads[:, None, None], query, keys) for rule in rules]
        return torch.stack(kept).expand(-1, len(heads), len(rows), len(keys))

    def holes(self, out: Tensor) -> str:
        """Return the fault of a whole output of ringtile, or an empty text: values that are not finite, or zeros."""
        if not out.isfinite().all():
            return "wrong: its output is not finite"
        zero = (out == 0).all(-1)
        # Few rows of zeros are right: only these are compared with the pattern.
        rows = zero.flatten(0, 1).any(0).nonzero().squeeze(1)[:CHECKED_ROWS]
        if (zero[:, :, rows] & self.kept(self.case.pattern, rows).any(-1)).any():
            return "wrong: zeros in rows that keep keys"
        return ""

    def run(self, attention: Attention, direction: str, grad: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        """Call an attention once: the output, and its gradients unless the direction is forward."""
        if direction == FORWARD:
            return attention(*self.inputs), ()
        leaves = [x.detach().requires_grad_() for x in self.inputs]
        out = attention(*leaves)
        return out.detach(), torch.autograd.grad(out, leaves, grad)

    def peaks(self, attention: Attention, direction: str) -> Peaks:
        """Return the peak memory of one call."""
        trains = direction != FORWARD
        leaves = [x.detach().requires_grad_(trains) for x in self.inputs]
        backward = (lambda out: torch.autograd.grad(out, leaves, self.grad)) if trains else None
        return peak_memory(lambda: attention(*leaves), backward, self.case.device)
