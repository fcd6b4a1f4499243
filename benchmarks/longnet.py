"""Time LongNet's dilated attention against dense attention and torchscale's LongNet, forward and backward.

    python benchmarks/longnet.py                                        ringtile and dense
    python benchmarks/longnet.py --torchscale DIR [--torchscale DIR]    with the folders of torchscale and einops
    python benchmarks/longnet.py --tokens 16K --memory --json out.json

Sampled rows of outputs and gradients are compared with float64 first, and a wrong result ends the run. Then calls take
turns in one process; times are medians. Dense attention is timed at ``--dense-tokens`` and scaled by the square of the
ratio of lengths. torchscale's LongNet needs flash-attention, hence a GPU; PyTorch's flash kernel for CPUs, which is
exact, takes its place. torchscale treats the weights that mix branches as constants, so its gradients are not those of
its output, and only its output is checked.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ringtile.functional import dilated_attention
from ringtile.tools.bench.exact import relative_error
from ringtile.tools.machine import origin
from ringtile.tools.memory import peak_memory
from ringtile.tools.timing import interleaved
from ringtile.tools.units import count

SEGMENTS, RATES = (2048, 4096, 8192, 16384), (1, 2, 4, 8)
CHECKED_TOKENS, CHECKED_ROWS, BOUND = 16384, 48, 1e-5

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def counts(rows: Tensor, heads: int, is_causal: bool, per_offset: bool) -> Tensor:
    """Count the branches that keep each pair, ``[H, rows, N]``. Per offset, neighboring heads share their tokens."""
    keys = torch.arange(CHECKED_TOKENS)
    total = torch.zeros(heads, len(rows), CHECKED_TOKENS, dtype=torch.float64)
    for head in range(heads):
        for length, rate in zip(SEGMENTS, RATES, strict=True):
            offset = head // -(-heads // rate) if per_offset else head % rate
            kept = (rows // length).unsqueeze(1) == keys // length
            kept &= (rows % length % rate == offset).unsqueeze(1) & (keys % length % rate == offset)
            total[head] += kept & (keys <= rows.unsqueeze(1)) if is_causal else kept
    return total


def errors(attention: Attention, inputs: list[Tensor], grad: Tensor, counted: Tensor, rows: Tensor) -> list[float]:
    """Return the errors of the output and of the gradients, for rows in which a pair counts ``counted`` times."""
    q, k, v = leaves = [x.detach().double().requires_grad_() for x in inputs]
    expected = torch.softmax(q[:, :, rows] @ k.mT * q.shape[-1] ** -0.5 + counted.log(), -1) @ v
    exact = [expected.detach(), *torch.autograd.grad(expected, leaves, grad[:, :, rows].double())]
    rows_grad = torch.zeros_like(grad)
    rows_grad[:, :, rows] = grad[:, :, rows]
    out = attention(*inputs)
    got = [out.detach()[:, :, rows], *torch.autograd.grad(out, inputs, rows_grad)]
    return [relative_error(mine, right) for mine, right in zip(got, exact, strict=True)]


class _Flash(torch.autograd.Function):
    """PyTorch's flash kernel for CPUs in flash-attention's shapes, ``[B, N, H, D]`` with lse ``[B, H, N]``."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, is_causal=is_causal)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.is_causal = is_causal
        return out.transpose(1, 2), lse

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        saved = (grad.transpose(1, 2), *ctx.saved_tensors)
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(*saved, 0.0, ctx.is_causal)
        return *(x.transpose(1, 2) for x in found), None


def torchscale_attention(args: argparse.Namespace) -> Attention:
    """Return torchscale's LongNet from q, k and v ``[B, H, N, D]`` to the output, without its projections."""
    sys.path[:0] = [str(folder) for folder in args.torchscale]
    theirs = importlib.import_module("torchscale.component.dilated_attention")
    base = importlib.import_module("torchscale.component.multihead_attention")
    base.flash_attn_func = lambda q, k, v, dropout, bias, scale, causal: _Flash.apply(q, k, v, causal)
    module = theirs.DilatedAttention.__new__(theirs.DilatedAttention)
    torch.nn.Module.__init__(module)
    module.num_heads, module.head_dim, module.dropout = args.heads, args.head_dim, 0.0
    module.args = SimpleNamespace(dilated_ratio=list(RATES), segment_length=list(SEGMENTS), flash_attention=True)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        branches = []
        for length, rate in zip(SEGMENTS, RATES, strict=True):
            pieces = [module.gathering(x, rate, length, is_causal=args.causal, seq_parall=False) for x in (q, k, v)]
            branches.append(module.attention_ops(*pieces, is_causal=args.causal))
        outs, lses = (list(parts) for parts in zip(*branches, strict=True))
        joined: Tensor = module.scattering(outs, lses, q.shape[1], q.shape[0])
        return joined.unflatten(-1, (args.heads, args.head_dim)).transpose(1, 2)

    return attention


def make_inputs(args: argparse.Namespace, n_tokens: int) -> tuple[list[Tensor], Tensor]:
    """Draw q, k and v and a gradient of the output, laid out ``[B, N, H, D]`` as projections leave them."""
    generator = torch.Generator().manual_seed(args.seed)
    made = [torch.randn(1, n_tokens, args.heads, args.head_dim, generator=generator).transpose(1, 2) for _ in range(4)]
    return [x.requires_grad_() for x in made[:3]], made[3]


def step(attention: Attention, inputs: list[Tensor], grad: Tensor) -> tuple[float, float]:
    """Return the seconds of one forward and of one backward pass."""
    began = time.perf_counter()
    out = attention(*inputs)
    middle = time.perf_counter()
    torch.autograd.grad(out, inputs, grad)
    return middle - began, time.perf_counter() - middle


def check(args: argparse.Namespace, attentions: dict[str, Attention]) -> dict[str, list[float]]:
    """Return the errors of each against float64, and end the run if one exceeds `BOUND`."""
    inputs, grad = make_inputs(args, CHECKED_TOKENS)
    rows = torch.randperm(CHECKED_TOKENS, generator=torch.Generator().manual_seed(1))[:CHECKED_ROWS]
    found = {}
    for name, attention in attentions.items():
        counted = counts(rows, args.heads, args.causal, name == "torchscale")
        found[name] = errors(attention, inputs, grad, counted.clamp(max=1) if name.endswith("union") else counted, rows)
        print(f"{name:16} errors of out, dq, dk, dv: " + " ".join(f"{error:.1e}" for error in found[name]), flush=True)
        if max(found[name][:1] if name == "torchscale" else found[name]) > BOUND:
            raise SystemExit(f"{name} is wrong: over {BOUND}; nothing is timed")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--tokens", type=count, default=65536)
    add("--dense-tokens", type=count, default=16384)
    add("--heads", type=int, default=8)
    add("--head-dim", type=int, default=64)
    add("--causal", action="store_true")
    add("--rounds", type=int, default=3)
    add("--threads", type=int, default=torch.get_num_threads())
    add("--seed", type=int, default=0)
    add("--torchscale", type=Path, action="append", help="a folder to import torchscale or einops from (repeatable)")
    add("--memory", action="store_true", help="also measure peak memory, at a quarter of the length and at it")
    add("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    options = {"segment_lengths": SEGMENTS, "dilation_rates": RATES, "is_causal": args.causal}
    attentions: dict[str, Attention] = {
        f"ringtile {overlap}": partial(dilated_attention, overlap=overlap, **options) for overlap in ("mix", "union")
    }
    if args.torchscale:
        attentions["torchscale"] = torchscale_attention(args)
    problem = {name: value for name, value in vars(args).items() if name not in ("torchscale", "json")}
    record: dict[str, Any] = {**origin(), "problem": problem, **options, "errors": check(args, attentions)}

    calls = {name: (attention, *make_inputs(args, args.tokens)) for name, attention in attentions.items()}
    dense = partial(F.scaled_dot_product_attention, is_causal=args.causal)
    calls["dense"] = (dense, *make_inputs(args, args.dense_tokens))
    seconds = interleaved({name: partial(step, *call) for name, call in calls.items()}, args.rounds)
    scale = (args.tokens / args.dense_tokens) ** 2
    seconds["dense"] = [(scale * forward, scale * backward) for forward, backward in seconds["dense"]]
    record["seconds"] = seconds
    totals = {name: statistics.median(map(sum, each)) for name, each in seconds.items()}
    for name, each in seconds.items():
        forward, backward = (statistics.median(part) for part in zip(*each, strict=True))
        note = f"  (extrapolated from {args.dense_tokens:,} tokens)" if name == "dense" else ""
        ratio = totals[name] / totals["ringtile mix"]
        print(f"{name:16} forward {forward:8.2f} s  backward {backward:8.2f} s  {ratio:6.2f} x ours{note}", flush=True)

    for n_tokens in (args.tokens // 4, args.tokens) if args.memory else ():
        inputs, grad = make_inputs(args, n_tokens)
        for name, attention in attentions.items():
            backward = partial(torch.autograd.grad, inputs=inputs, grad_outputs=grad)
            peaks = peak_memory(partial(attention, *inputs), backward, torch.device("cpu"))
            record.setdefault("peak_bytes", {})[f"{name} {n_tokens}"] = peaks
            told = ", ".join(f"{(peak or 0) / grad.nbytes:.2f} {way}" for way, peak in peaks._asdict().items())
            print(
                f"{name:16} {n_tokens:7,} tokens: peak beyond inputs and results, in tensors like q: {told}", flush=True
            )
    if args.json:
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
