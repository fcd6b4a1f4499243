"""Small models that learn a task in seconds to minutes, and their training."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from small_tasks.tasks import NO_ANSWER, Stage, Task
from torch import Tensor, nn

from ringtile import SparseTransformer, sparse_attention
from ringtile.tools.record import whole

Attend = Callable[..., Any]

_ENOUGH = 0.998
"""Accuracy of a batch that counts as learned."""
_IN_A_ROW = 8
"""Number of such batches that end a stage."""
_WARM_UP = 20


class _Switch:
    """A layer's ``attend=`` that can be replaced. No module, so that no selector becomes part of the weights."""

    def __init__(self) -> None:
        self.attend: Attend = sparse_attention

    def __call__(self, *inputs: Tensor, **options: Any) -> Any:
        return self.attend(*inputs, **options)


class Reader(nn.Module):
    """Embedding, a causal convolution of width 3, `SparseTransformer` and a head.

    It starts close to an induction head, so that training takes seconds to minutes: values are copied, the head reads
    embeddings, and keys find equal queries (adapted from Zoology, arXiv:2312.04927). With the "mixed" start, the
    convolution adds the token before, and key weights equal query weights. With the "split" start, half of the
    channels hold the token before, keys read these and queries the others. Both have random parts, and all is trained.

    Args:
        task: The task, which says how large.
    """

    def __init__(self, task: Task) -> None:
        super().__init__()
        width = task.width
        self.embedding = nn.Embedding(task.vocabulary, width)
        self.convolution = nn.Conv1d(width, width, 3, groups=width, bias=False)
        self.body = SparseTransformer(
            task.layers, width, 2, hidden_dim=2 * width, is_causal=True, rotary=task.rotary, attend=sparse_attention
        )
        self.head = nn.Linear(width, task.vocabulary, bias=False)
        layers: list[Any] = list(self.body.layers)
        self.switches = [_Switch() for _ in layers]
        for layer, switch in zip(layers, self.switches, strict=True):
            # The layers keep their switch for life, and only what it points to changes.
            layer.attend = switch
        with torch.no_grad():
            (self._start_split if task.start == "split" else self._start_mixed)(layers)

    def _start_mixed(self, layers: list[Any]) -> None:
        width = self.embedding.embedding_dim
        # Of the three tokens that the convolution sees, number 1 is the one before.
        self.convolution.weight.zero_()[:, 0, 1] = 1
        for layer in layers:
            query, key, value = layer.qkv.weight.split(width)
            # Equal weights for keys and queries give the most to keys that equal the query.
            key.copy_(query)
            value.copy_(torch.linalg.qr(torch.randn(width, width)).Q)
            # The inverse of an orthogonal map is its transpose, so a value comes out as the embedding that went in.
            layer.output.weight.copy_(value.T)
            nn.init.normal_(layer.down.weight, std=0.02)
        self.head.weight.copy_(self.embedding.weight / (2 * math.sqrt(width)))

    def _start_split(self, layers: list[Any]) -> None:
        width = self.embedding.embedding_dim
        half = width // 2
        self.embedding.weight[:, half:] = self.embedding.weight[:, :half]
        # The second half adds the token before and takes off the current one, which the embedding has put there.
        self.convolution.weight.zero_()[half:, 0, 1:] = torch.tensor([1.0, -1.0])
        for layer in layers:
            for weight in (layer.qkv.weight, layer.output.weight):
                nn.init.normal_(weight, std=0.5 / math.sqrt(width))
            nn.init.normal_(layer.down.weight, std=0.02)
            query, key, value = layer.qkv.weight.split(width)
            # Two heads, each as wide as half of the model.
            for head in (slice(0, half), slice(half, width)):
                match, copy = (torch.linalg.qr(torch.randn(half, half)).Q for _ in range(2))
                query[head, :half] += math.sqrt(2) * match
                key[head, half:] += math.sqrt(2) * match
                value[head, :half] += copy
                layer.output.weight[:half, head] += copy.T
        self.head.weight.zero_()[:, :half] = self.embedding.weight[:, :half] / math.sqrt(half)

    def attend_with(self, attends: list[Attend]) -> None:
        """Use one attention function per layer."""
        for switch, attend in zip(self.switches, attends, strict=True):
            switch.attend = attend

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        """Return the logits of the positions ``at``, bool ``[B, N]``."""
        embedded = self.embedding(x)
        # Two zeros in front make the convolution causal.
        mixed = self.convolution(F.pad(embedded.transpose(1, 2), (2, 0))).transpose(1, 2)
        hidden: Tensor = self.body(embedded + mixed)
        logits: Tensor = self.head(hidden[at])
        return logits


@torch.enable_grad()
def train(model: Reader, task: Task, stages: tuple[Stage, ...], seed: int) -> None:
    """Train on batches that are drawn from a seed."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), task.rate, weight_decay=0.1, betas=(0.9, 0.98))
    taken = 0
    for stage in stages:
        learned = 0
        for step in range(stage.steps):
            # The last stage ends at a rate of 0, so that no answer depends on the last batches.
            left = 1 - step / stage.steps if stage is stages[-1] else 1.0
            for group in optimizer.param_groups:
                group["lr"] = task.rate * min(left, (taken + 1) / _WARM_UP)
            x, y = task.draw(stage.batch, stage.tokens, stage.size, generator)
            at = y != NO_ANSWER
            logits, answer = model(x, at), y[at]
            optimizer.zero_grad()
            F.cross_entropy(logits, answer).backward()
            # Near an induction head, single batches have gradients that would throw it off.
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            taken += 1
            if not task.language:
                right = (logits.detach().argmax(1) == answer).float().mean().item()
                learned = learned + 1 if right >= _ENOUGH else 0
                if learned == _IN_A_ROW:
                    break


@torch.no_grad()
def judge(model: Reader, task: Task, batches: list[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """Return the accuracy of the answers, or the bits per byte of a language."""
    right, loss, count = 0, 0.0, 0
    for x, y in batches:
        at = y != NO_ANSWER
        logits, answer = model(x, at), y[at]
        right += int((logits.argmax(1) == answer).sum())
        loss += float(F.cross_entropy(logits, answer, reduction="sum"))
        count += len(answer)
    return {"bits": loss / count / math.log(2)} if task.language else {"accuracy": right / count}


def save(model: Reader, path: Path) -> None:
    """Write the weights, so that a reader finds all or none of them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole(path) as draft:
        torch.save(model.state_dict(), draft)


def restore(model: Reader, path: Path) -> bool:
    """Read the weights of `save`, and return whether there were any."""
    if not path.exists():
        return False
    model.load_state_dict(torch.load(path, weights_only=True))
    return True
