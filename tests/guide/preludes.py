"""What each code block of the guide leaves undefined, and nothing else, by the block's number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import dilated_attention_pytorch as compat

Names = dict[str, Any]


def _multihead() -> compat.BlockSparseRingMultiheadDilatedAttention:
    return compat.create_block_sparse_multihead_attention(32, 4, 0.25, "local_window")


def _core_inputs() -> Names:
    query, key, value = torch.randn(3, 1, 700, 4, 16).unbind()
    return {"query": query, "key": key, "value": value}


def _embedded_inputs() -> Names:
    query, key, value = torch.randn(3, 1, 700, 512).unbind()
    return {"query": query, "key": key, "value": value}


def _quality() -> Names:
    scores = torch.randn(2, 1024, 1024)
    generator = compat.SparsePatternGenerator(compat.PatternConfig("local_window", 0.25))
    return {"pattern": generator.generate_pattern(1024, 2), "dense_attention_weights": scores.softmax(-1)}


def _adjustment() -> Names:
    attention = _multihead()
    attention.performance_monitor.enable()
    return {"attention": attention, "num_epochs": 2, "train_model": lambda: attention(torch.randn(1, 500, 32))}


def _custom_pattern() -> Names:
    return {"attention": _multihead(), "key": 512, "custom_pattern": torch.eye(4, dtype=torch.bool).expand(4, 4, 4)}


def _memory() -> Names:
    attention = _multihead()
    attention(torch.randn(1, 500, 32))
    return {"attention": attention, "torch": torch}


class Later:
    """An optimizer of the parameters that the loss depends on, which the block makes after the prelude."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []
        self.losses: list[float] = []

    def step(self) -> None:
        found = [x for x in self.seen if x.grad is not None]
        torch.optim.SGD(found, lr=0.3).step()
        torch.optim.SGD(found).zero_grad()


def _leaves(loss: torch.Tensor) -> list[torch.Tensor]:
    found, todo, known = [], [loss.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is None or node in known:
            continue
        known.add(node)
        found += [node.variable] if hasattr(node, "variable") else []
        todo += [following for following, _ in node.next_functions]
    return found


def _training() -> Names:
    optimizer = Later()
    targets = torch.randn(1, 1100, 768)

    def compute_loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(output, targets)
        optimizer.seen = _leaves(loss)
        optimizer.losses.append(loss.item())
        return loss

    # A topic for each 128 tokens: queries and keys of random weights prefer some topics by far.
    batch = 4 * torch.randn(1, 9, 768).repeat_interleave(128, 1)[:, :1100] + torch.randn(1, 1100, 768)
    return {"dataloader": [batch, batch], "compute_loss": compute_loss, "targets": targets, "optimizer": optimizer}


def _monitoring() -> Names:
    attention = _multihead()
    return {"attention": attention, "model": attention, "dataloader": torch.randn(2, 1, 500, 32)}


def _troubled() -> Names:
    attention = _multihead()
    attention(torch.randn(1, 500, 32))
    return {"attention": attention, "config": attention.sparse_config}


def _config_class() -> Names:
    return {"SparsePatternConfig": compat.SparsePatternConfig}


PRELUDES: dict[int, Callable[[], Names]] = {
    1: _config_class,
    2: _config_class,
    3: _config_class,
    4: lambda: {"BlockSparseRingDilatedAttention": compat.BlockSparseRingDilatedAttention},
    5: _core_inputs,
    6: _embedded_inputs,
    7: dict,
    8: dict,
    9: _training,
    10: lambda: {f"{name}_local": torch.randn(1, 500, 2, 16) for name in "qkv"},
    11: dict,
    12: _quality,
    13: _adjustment,
    14: _custom_pattern,
    15: lambda: {**_config_class(), "torch": torch},
    16: _memory,
    17: _monitoring,
    18: lambda: {
        "create_block_sparse_multihead_attention": compat.create_block_sparse_multihead_attention,
        "F": F,
        "model": None,
    },
    19: lambda: {"attention": _multihead()},
    20: _troubled,
    21: _troubled,
    22: dict,
}
