"""Attention over ranks and compressed gradients under their old names: tensors are ``[B, N, H, D]`` here."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dilated_attention_pytorch.attention import tokens_first, with_weights
from ringtile.distributed import Layout, ring_attention
from ringtile.functional import sparse_attention
from ringtile.functional.dilated import checked_branches
from ringtile.kernels.philox import dropout_threshold
from ringtile.patterns import Causal, Pattern, hierarchical, longnet_union
from ringtile.tools.predict import Sizes, cheapest_layout
from ringtile.tools.predict.cost import estimate
from ringtile.tools.predict.hardware import HARDWARE
from ringtile.tools.predict.work import survey

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

_START = 2
"""First step with PowerSGD. DDP builds its buckets anew after the first."""


_LEVELS = {"local_sparsity": 0.4, "global_sparsity": 0.1, "inter_node_sparsity": 0.05}
"""The density of each level by default."""


class DistributedSparsePattern(Enum):
    """The kinds of patterns of `DistributedSparseConfig`."""

    HIERARCHICAL = "hierarchical"


@dataclass(frozen=True)
class DistributedSparseConfig:
    """Densities inside and between ranks, and how work and gradients are shared.

    Each density is the fraction of pairs that is kept, of the pairs that the level adds. Levels are lengths in tokens:
    the first and the last of ``segment_lengths``. So another number of ranks does not change the model.

    Args:
        pattern_type: ``DistributedSparsePattern.HIERARCHICAL``, or its text.
        local_sparsity: Density inside the first segment length. Default: 0.4.
        global_sparsity: Density inside the last segment length. Default: 0.1.
        inter_node_sparsity: Density beyond. Default: 0.05.
        enable_load_balancing: True to choose the tokens of each rank by the predicted time. It never changes the mask.
        enable_gradient_compression: True to let `compress_gradients` register PyTorch's hooks.
        compression_ratio: Elements sent per element of the gradients, by PowerSGD. Default: None, float16.
        sparsity_ratio: Density of each level that has none. Default: None, the defaults above.
        load_balance_threshold: Load balancing keeps contiguous tokens while the rank with the most work has at most
            this part more than the mean, such as 0.15. Default: None, the least predicted time decides.

    Raises:
        ValueError: If a value is out of range. A ``compression_ratio`` without compression is a UserWarning, and so are
            a ``load_balance_threshold`` without load balancing and a ``sparsity_ratio`` beside all three densities.

    >>> DistributedSparseConfig(local_sparsity=0.5).pattern_type
    <DistributedSparsePattern.HIERARCHICAL: 'hierarchical'>
    """

    pattern_type: DistributedSparsePattern | str = DistributedSparsePattern.HIERARCHICAL
    # `__post_init__` fills in the densities that you leave out.
    local_sparsity: float | None = None
    global_sparsity: float | None = None
    inter_node_sparsity: float | None = None
    enable_load_balancing: bool = False
    enable_gradient_compression: bool = False
    compression_ratio: float | None = None
    sparsity_ratio: float | None = None
    load_balance_threshold: float | None = None

    def __post_init__(self) -> None:
        if self.pattern_type == "hierarchical":
            object.__setattr__(self, "pattern_type", DistributedSparsePattern.HIERARCHICAL)
        if not isinstance(self.pattern_type, DistributedSparsePattern):
            raise ValueError(f"pattern_type: expected a DistributedSparsePattern, got {self.pattern_type!r}")
        for name in (*_LEVELS, "sparsity_ratio"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise ValueError(f"{name}: expected a density in [0, 1], got {value!r}")
        density, own = self.sparsity_ratio, [getattr(self, name) for name in _LEVELS]
        if density is not None and None not in own and density not in own:
            _changes_nothing("sparsity_ratio", density, f"{', '.join(_LEVELS)} decide")
        for name, value in zip(_LEVELS, own, strict=True):
            if value is None:
                object.__setattr__(self, name, _LEVELS[name] if density is None else density)
        threshold, ratio = self.load_balance_threshold, self.compression_ratio
        if threshold is not None and not threshold >= 0:
            raise ValueError(f"load_balance_threshold: expected at least 0, got {threshold!r}")
        if threshold is not None and not self.enable_load_balancing:
            _changes_nothing("load_balance_threshold", threshold, "enable_load_balancing=False decides")
        if ratio is not None and not 0 < ratio < 1:
            raise ValueError(f"compression_ratio: expected a number between 0 and 1, got {ratio!r}")
        if ratio is not None and not self.enable_gradient_compression:
            _changes_nothing("compression_ratio", ratio, "enable_gradient_compression=False decides")


def _changes_nothing(name: str, value: float, decides: str) -> None:
    # Four frames up is your line: warn, this one, __post_init__ and the __init__ that dataclass writes.
    warnings.warn(f"{name}={value} changes nothing: {decides}", stacklevel=4)


class BlockSparseRingAdvancedDistributedDilatedAttention(nn.Module):
    """Exact attention over a sequence that ranks share: the pairs of a hierarchy and of LongNet's branches.

    The kept pairs are ``hierarchical(segment_lengths[0], segment_lengths[-1], ...)`` with the densities of the
    configuration, joined with ``longnet_union(segment_lengths, dilation_rates)``, in one softmax. All ranks hold
    equally many tokens: the parts of `layout`, which is contiguous without load balancing.

    Args:
        segment_lengths: Tokens per segment, for each branch, ascending.
        dilation_rates: One rate for each branch.
        distributed_config: Default: ``DistributedSparseConfig()``.
        dropout: Probability of dropping a weight after the softmax in training.
        enable_deepspeed_integration: True for DeepSpeed's sequence-parallel group, if DeepSpeed has made one.
        group: Process group of the ranks. Default: all ranks, or a single process.

    Raises:
        ValueError: If an argument is out of range.

    Example:
        >>> attention = BlockSparseRingAdvancedDistributedDilatedAttention([128, 256], [1, 2])
        >>> attention(torch.randn(1, 512, 2, 16)).shape
        torch.Size([1, 512, 2, 16])
    """

    def __init__(
        self,
        segment_lengths: Sequence[int],
        dilation_rates: Sequence[int],
        distributed_config: DistributedSparseConfig | None = None,
        *,
        dropout: float = 0.0,
        enable_deepspeed_integration: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        branches = checked_branches(segment_lengths, dilation_rates)
        dropout_threshold(dropout)
        self.config = config = distributed_config or DistributedSparseConfig()
        self.dropout, self.enable_deepspeed_integration = dropout, enable_deepspeed_integration
        lengths = [length for length, _ in branches]
        densities = [getattr(config, name) for name in _LEVELS]
        self.pattern: Pattern = hierarchical(lengths[0], lengths[-1], *densities) | longnet_union(
            lengths, [rate for _, rate in branches]
        )
        self._group = group

    def extra_repr(self) -> str:
        return repr(self.pattern)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group of the ranks; None for all ranks, or a single process."""
        # DeepSpeed makes its group after this module is built, so it is asked for at each call, and never imported.
        if self._group is None and self.enable_deepspeed_integration and "deepspeed" in sys.modules:
            groups: Any = sys.modules["deepspeed"].utils.groups
            return groups._get_sequence_parallel_group()  # type: ignore[no-any-return]
        return self._group

    def layout(self, n_tokens: int, is_causal: bool = False) -> Layout:
        """Return the tokens of each rank: contiguous, or of the least predicted time with load balancing.

        >>> config = DistributedSparseConfig(enable_load_balancing=True)
        >>> BlockSparseRingAdvancedDistributedDilatedAttention([128], [1], config).layout(256)
        Layout(n_tokens=256, runs=(((0, 256),),))
        """
        ranks = dist.get_world_size(self.group) if dist.is_initialized() else 1
        if not self.config.enable_load_balancing:
            return Layout.contiguous(n_tokens, ranks, unit=1)
        rule = Causal() & self.pattern if is_causal else self.pattern
        return _balanced(rule, n_tokens, ranks, self.config.load_balance_threshold)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        is_causal: bool = False,
        return_attention_weights: bool = False,
        *,
        key_mask: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, dict[str, Any]]:
        """Compute attention ``[B, N, H, D]`` of this rank's N tokens, its part of `layout`, to the tokens of all ranks.

        The arguments and errors are those of `BlockSparseRingDilatedAttention`.
        """
        how = {"is_causal": is_causal, "key_mask": key_mask, "dropout_p": self.dropout if self.training else 0.0}
        if return_attention_weights:
            ranks = dist.get_world_size(self.group) if dist.is_initialized() else 1
            return with_weights(self.attend, query, key, value, block_size=128, ranks=ranks, **how)
        return tokens_first(self.attend, query, key, value, **how)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, **options: Any) -> Tensor:
        """Compute attention ``[B, H, N, D]`` of this rank's N tokens, its part of `layout`, to those of all ranks."""
        if not dist.is_initialized():
            whole: Tensor = sparse_attention(query, key, value, self.pattern, is_causal=is_causal, **options)
            return whole
        layout = self.layout(query.shape[2] * dist.get_world_size(self.group), is_causal)
        options |= {"is_causal": is_causal, "layout": layout, "group": self.group}
        out: Tensor = ring_attention(query, key, value, self.pattern, **options)
        return out

    def compress_gradients(self, model: DistributedDataParallel) -> GradientCompression:
        """Compress the gradients of a model's parameters as the configuration tells, see `compress_gradients`."""
        return compress_gradients(model, self.config)


# Every call of a module asks for its layout, and the search plans each candidate at each rank. A layout follows from
# the rule and the two numbers alone, so an entry never becomes wrong, and all ranks find the same.
@lru_cache(maxsize=64)
def _balanced(pattern: Pattern, n_tokens: int, n_ranks: int, threshold: float | None) -> Layout:
    plain, sizes = Layout.contiguous(n_tokens, n_ranks, unit=1), Sizes(heads=pattern.num_heads or 8, kv_heads=1)
    if threshold is not None:
        work = survey(pattern, plain, sizes)
        if estimate(work, work.automatic, HARDWARE["h100"]).balance <= 1 + threshold:
            return plain
    layout = cheapest_layout(pattern, n_tokens, n_ranks, sizes)
    # Ranks know the length of the sequence from their own part, so parts are equal.
    return layout if len({layout.size(rank) for rank in range(n_ranks)}) == 1 else plain


class Savings(NamedTuple):
    """Elements of all gradients, and the float32 elements sent for them, since the hook compresses."""

    before: int
    after: float

    @property
    def ratio(self) -> float:
        """Elements sent per element."""
        return self.after / self.before if self.before else 1.0


class GradientCompression:
    """The compression of a model's gradients by PyTorch's hooks, and what it saves. `compress_gradients` makes it."""

    def __init__(self, kind: str, rank: int | None, state: Any) -> None:
        self.kind, self.rank, self._state = kind, rank, state

    @property
    def savings(self) -> Savings:
        """The elements that PowerSGD counted. float16 sends half of the bytes, and counts nothing."""
        if self.rank is None:
            return Savings(2, 1.0)
        _, before, after = self._state.compression_stats()
        return Savings(before, after)

    def __repr__(self) -> str:
        rank = "" if self.rank is None else f" of rank {self.rank} with error feedback"
        return f"GradientCompression({self.kind}{rank}, sends {self.savings.ratio:.3f} of the elements)"


def compress_gradients(
    model: DistributedDataParallel | FSDPModule,
    config: DistributedSparseConfig,
    *,
    replicas: dist.ProcessGroup | None = None,
    sums: bool = False,
) -> GradientCompression:
    """Register PyTorch's hook for a configuration on a model. The gradients of keys and values are never compressed.

    With a ratio: PowerSGD with error feedback (Vogels et al., arXiv:1905.13727), from the third step on, of the rank
    whose share of elements is closest to the ratio. Without: float16. bfloat16 needs NCCL.

    A model of ``fully_shard`` is compressed between replicas alone, as in HSDP: shard it over one dimension of a mesh,
    and pass the group of the other. The sums inside the shards keep their dtype. It has no PowerSGD.

    Args:
        model: A model of DDP, or of FSDP2.
        config: The configuration.
        replicas: For FSDP2, the ranks that hold the same shard.
        sums: For FSDP2, True to add up the replicas' gradients, as with ``set_gradient_divide_factor(1.0)``. Default:
            their mean.

    Raises:
        TypeError: If the model is of neither, or PowerSGD is asked for on FSDP2.
        ValueError: If the configuration does not compress, or ``replicas`` does not fit the model.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
    from torch.distributed.fsdp import FSDPModule

    if not config.enable_gradient_compression:
        raise ValueError(f"config: expected enable_gradient_compression=True, got {config}")
    if isinstance(model, FSDPModule) != (replicas is not None):
        raise ValueError(f"replicas: expected a group for FSDP2 and None for others, got {replicas} for {type(model)}")
    if replicas is not None and config.compression_ratio is None:
        assert isinstance(model, nn.Module)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_all_reduce_hook(partial(_reduce_in_half, replicas, sums))
        return GradientCompression("float16", None, None)
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(
            f"model: expected a DistributedDataParallel, got {type(model).__name__}: PyTorch has no PowerSGD for others"
        )
    if config.compression_ratio is None:
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        return GradientCompression("float16", None, None)
    shapes = [parameter.shape for parameter in model.parameters() if parameter.requires_grad]
    rank = rank_of(shapes, config.compression_ratio)
    # Compress every matrix that the rank makes smaller: the rank was chosen from the share of all of them.
    state = powerSGD_hook.PowerSGDState(
        model.process_group,
        matrix_approximation_rank=rank,
        start_powerSGD_iter=_START,
        min_compression_rate=1,
        use_error_feedback=True,
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return GradientCompression("PowerSGD", rank, state)


def _reduce_in_half(replicas: dist.ProcessGroup, sums: bool, grads: Tensor) -> None:
    """Replace gradients by the mean or the sum over replicas, which travel in float16."""
    # Divided first, so that sums do not overflow: float16 ends at 65,504, and eight gradients of 10,000 pass it.
    half = (grads / replicas.size()).half()
    dist.all_reduce(half, group=replicas)
    grads.copy_(half)
    if sums:
        grads.mul_(replicas.size())


def rank_of(shapes: Sequence[torch.Size], ratio: float) -> int:
    """Return the rank of PowerSGD whose share of elements is closest to a ratio. Vectors are sent as they are.

    >>> rank_of([torch.Size([100, 100])], 0.1)
    5
    """
    # PowerSGD sees a weight [out, in, 3] as a matrix of out x (3 in) and sends two factors of the rank.
    matrices = [(shape[0], shape[1:].numel()) for shape in shapes if len(shape) > 1]
    vectors = sum(shape.numel() for shape in shapes if len(shape) <= 1)
    total = vectors + sum(rows * cols for rows, cols in matrices)

    def share(rank: int) -> float:
        return (vectors + sum(min(rows * cols, rank * (rows + cols)) for rows, cols in matrices)) / total

    largest = max((min(matrix) for matrix in matrices), default=1)
    return min(range(1, largest + 1), key=lambda rank: abs(share(rank) - ratio))
