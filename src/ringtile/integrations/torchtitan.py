"""torchtitan: its inner attention over any pattern, also over the ranks of its context parallelism.

torchtitan 0.3. It is loaded with the class `SparseAttention`, not with this module.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor

from ringtile.functional import sparse_attention
from ringtile.patterns import Documents, Pattern
from ringtile.patterns.checks import refuse_unknown
from ringtile.patterns.grammar import as_rule


def documents_of(positions: Tensor) -> Documents:
    """Return the documents of packed rows, from positions ``[B, N]`` that begin again in each of them.

    >>> import torch
    >>> documents_of(torch.tensor([[0, 1, 2, 0, 1]])) == Documents(ids=torch.tensor([[0, 0, 0, 1, 1]]))
    True
    """
    return Documents(ids=(positions.diff(prepend=positions[:, :1] - 1) != 1).cumsum(1))


def __getattr__(name: str) -> Any:
    if name == "SparseAttention":
        return _attention_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# torchtitan compares classes of configurations, so there is one. The cache holds it for the life of the process.
@cache
def _attention_class() -> Any:
    from torch.distributed.tensor import DTensor, Shard
    from torchtitan.models.common.attention import ScaledDotProductAttention

    from ringtile.distributed import Layout, ring_attention

    class SparseAttention(ScaledDotProductAttention):  # type: ignore[misc]
        """Attention over the kept pairs of a pattern, as torchtitan's ``inner_attention``.

        With a context-parallel degree above 1, torchtitan hands over shards with their mesh, and the class computes
        `ring_attention`: each rank gets the keys that its rows need. Set the balancer of the configuration to
        torchtitan's ``context_parallel_load_balancer``. torchtitan gives this kind of attention no documents: pass
        ``attention_masks=documents_of(positions)`` of the whole batch to the model.
        """

        @dataclass(kw_only=True, slots=True)
        class Config(ScaledDotProductAttention.Config):  # type: ignore[misc]
            pattern: str = "causal"
            """The kept pairs, in the words of the command line."""
            balancer: str | None = "headtail"
            """How torchtitan deals out tokens: "headtail", or None for equal runs."""

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            if config.balancer not in ("headtail", None):
                raise ValueError(f"balancer: expected 'headtail' or None, got {config.balancer!r}")
            self.pattern, self.balancer = as_rule(config.pattern), config.balancer

        def forward(
            self,
            q: Any,
            k: Any,
            v: Any,
            *,
            attention_masks: Pattern | str | None = None,
            scale: float | None = None,
            enable_gqa: bool = False,
            is_causal: bool = True,
            out_transform: Callable[[Tensor, Tensor], Tensor] | None = None,
            **options: object,
        ) -> Tensor:
            """Return the output ``[B, N, H, Dv]`` of q, k and v ``[B, N, H, D]``.

            ``out_transform`` gets the output and the lse ``[B, N, H]``. Raises ValueError for other options and masks.
            """
            refuse_unknown(options, super().forward, "SparseAttention")
            if not isinstance(attention_masks, Pattern | str | None):
                got = type(attention_masks).__name__
                raise ValueError(f"attention_masks: expected a Pattern, its text or None, got {got}")
            rule = self.pattern if attention_masks is None else self.pattern & as_rule(attention_masks)
            compute: Any = sparse_attention
            keywords: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
            if isinstance(q, DTensor):
                mesh = q.device_mesh
                if mesh.ndim != 1 or any(tuple(x.placements) != (Shard(1),) for x in (q, k, v)):
                    raise ValueError(
                        f"q: expected tokens that one mesh dimension shares, got {q.placements=} on {mesh}"
                    )
                n_tokens, n_ranks = q.shape[1], mesh.size()
                # PyTorch's shards are equal, whole tiles or not.
                if self.balancer is None:
                    layout = Layout.contiguous(n_tokens, n_ranks, unit=n_tokens // n_ranks)
                else:
                    layout = Layout.zigzag(n_tokens, n_ranks, unit=n_tokens // (2 * n_ranks))
                compute = ring_attention
                keywords.update(layout=layout, group=mesh)
                q, k, v = q.to_local(), k.to_local(), v.to_local()
            tensors = (x.transpose(1, 2) for x in (q, k, v))
            out, lse = compute(*tensors, rule, return_lse=True, **keywords)
            out, lse = out.transpose(1, 2), lse.transpose(1, 2)
            return out if out_transform is None else out_transform(out, lse)

    return SparseAttention
