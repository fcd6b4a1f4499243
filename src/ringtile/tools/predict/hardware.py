"""Figures of a cluster, and the sizes of a call, for predictions."""

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

import torch

from ringtile.patterns.checks import check_positive

_KINDS: dict[Any, str] = {str: "a string", bool: "true or false", int: "a positive integer", float: "a positive number"}


@dataclass(frozen=True)
class Hardware:
    """Figures of a cluster that predictions use. Links inside a node and between nodes work at the same time.

    Raises ValueError if a figure is not a positive number.
    """

    name: str
    assumption: str
    """Source of the figures, in one line."""
    ranks_per_node: int
    node_alpha: float
    """Seconds per message inside a node."""
    node_beta: float
    """Bytes per second, rank and direction inside a node."""
    net_alpha: float
    """Seconds per message between nodes."""
    net_beta: float
    """Bytes per second, rank and direction between nodes."""
    processors_per_node: int
    """Accelerators of a node, or cores with one thread per rank. More ranks than that share them."""
    has_trees: bool
    """True if a rank of a broadcast sends the whole message to several, one after another, as gloo does. False if the
    message passes through all ranks in pieces, as in NCCL."""
    flops: float
    """Matrix operations per second and processor that attention reaches."""
    memory: float
    """Bytes per second and processor that copies read or write."""
    call: float
    """Seconds per attention call, before it computes."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value, kind = getattr(self, field.name), field.type
            # JSON has a whole number for some floats.
            named = type(value) in (kind, int if kind is float else kind)
            if not named or (kind in (int, float) and not 0 < value < float("inf")):
                raise ValueError(f"{field.name}: expected {_KINDS[kind]}, got {value!r}")

    @property
    def in_node(self) -> tuple[float, float]:
        """Seconds per message and bytes per second inside a node."""
        return self.node_alpha, self.node_beta

    @property
    def between(self) -> tuple[float, float]:
        """Seconds per message and bytes per second between nodes."""
        return self.net_alpha, self.net_beta

    def slowest(self, n_ranks: int) -> tuple[float, float]:
        """Return the figures of the slowest link that a collective of all ranks crosses."""
        return self.between if n_ranks > self.ranks_per_node else self.in_node

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a JSON object with all fields. Raises ValueError if the file has other content."""
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path}: expected a JSON object, got {error}") from None
        names = [field.name for field in fields(cls)]
        if not isinstance(found, dict) or sorted(found) != sorted(names):
            got = ", ".join(found) if isinstance(found, dict) else type(found).__name__
            raise ValueError(f"{path}: expected an object with {', '.join(names)}, got {got}")
        return cls(**found)


def _accelerator(name: str, link: float, network: float, flops: float, memory: float) -> Hardware:
    """Return a cluster of eight accelerators per node, from figures of the vendor in units of 10^9."""
    return Hardware(
        name,
        f"8 per node, {link:g} GB/s per direction inside and {network:g} GB/s between nodes, {flops / 1e3:g} TFLOP/s "
        f"dense bfloat16, {memory / 1e3:g} TB/s memory (vendor's figures); 80% of each link and of memory and 40% of "
        "the matrix rate reached, 12 and 14 us per message, 10 us per call (assumed)",
        ranks_per_node=8,
        node_alpha=12e-6,
        node_beta=0.8e9 * link,
        net_alpha=14e-6,
        net_beta=0.8e9 * network,
        processors_per_node=8,
        has_trees=False,
        flops=0.4e9 * flops,
        memory=0.8e9 * memory,
        call=10e-6,
    )


HARDWARE = {
    "a100": _accelerator("a100", 300, 25, 312e3, 2.0e3),
    "h100": _accelerator("h100", 450, 50, 989e3, 3.35e3),
    "b200": _accelerator("b200", 900, 50, 2250e3, 8.0e3),
}
"""Clusters by name, from data sheets: NVLink 3, 4 and 5, with a HDR or NDR InfiniBand port per accelerator."""


@dataclass(frozen=True)
class Sizes:
    """Shapes and dtype of a call. ``value_dim`` is ``head_dim`` by default.

    Raises ValueError if a size is not a positive integer, or query heads are no multiple of key heads.
    """

    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    value_dim: int | None = None
    batch: int = 1
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        if self.value_dim is None:
            object.__setattr__(self, "value_dim", self.head_dim)
        check_positive(**{name: size for name, size in vars(self).items() if name != "dtype"})
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads: expected a divisor of heads={self.heads}, got {self.kv_heads}")
        if not self.dtype.is_floating_point:
            raise ValueError(f"dtype: expected a floating-point dtype, got {self.dtype}")

    @property
    def width_of_head(self) -> int:
        """Elements of a token's key and value in one head."""
        assert self.value_dim is not None
        return self.head_dim + self.value_dim

    @property
    def token_bytes(self) -> tuple[int, int]:
        """Bytes of a token's keys and values, and of the sums of their gradients over ranks."""
        width = self.batch * self.kv_heads * self.width_of_head
        sums = torch.promote_types(self.dtype, torch.float32)
        return width * self.dtype.itemsize, width * sums.itemsize


def flops_per_pair(sizes: Sizes) -> tuple[int, int]:
    """Return the multiplications and additions per pair, forward (two matmuls) and backward (five)."""
    # Forward: scores and outputs. Backward: scores again, and the gradients of weights, values, queries and keys.
    return 2 * sizes.width_of_head, 2 * (sizes.head_dim + 2 * sizes.width_of_head)
