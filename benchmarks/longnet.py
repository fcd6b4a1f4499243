"""LongNet's dilated attention against dense attention and torchscale's LongNet, forward and backward.

    python benchmarks/longnet.py                                        ours and dense
    python benchmarks/longnet.py --torchscale DIR [--torchscale DIR]    with folders that torchscale and einops are in
    python benchmarks/longnet.py --tokens 16384 --memory --json out.json

Results come first: output and gradients of sampled rows against float64, and nobody is timed where ours is wrong.
Then calls in turn, round after round, in one process; medians. Dense attention is timed at ``--dense-tokens`` and its
time multiplied by the square of the ratio of lengths. torchscale's LongNet needs flash-attention, hence a GPU; here an
exact stand-in with its lse takes its place: torch's flash kernel for CPUs, so that what is compared is all the rest, or
with ``--stand-in eager`` matrix products. The gradient that torchscale computes is not that of its output (the weights
that mix branches count as constant), so its output alone is checked.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
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
from ringtile.measure.machine import commit, machine_facts, versions
from ringtile.measure.memory import peak_memory

SEGMENTS, RATES = (2048, 4096, 8192, 16384), (1, 2, 4, 8)
CHECKED_ROWS = 48
BOUND = 1e-5

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def offset_of(head: int, rate: int, heads: int) -> int:
    """The tokens of a segment that a head keeps, modulo the rate."""
    return head % rate


def torchscale_offset_of(head: int, rate: int, heads: int) -> int:
    """The same in torchscale, which gives neighbouring heads one offset."""
    return head // -(-heads // rate)


def counts(
    rows: Tensor, n_tokens: int, heads: int, is_causal: bool, offset: Callable[[int, int, int], int] = offset_of
) -> Tensor:
    """How many branches keep each pair, ``[H, rows, N]``, from the definition."""
    keys = torch.arange(n_tokens)
    total = torch.zeros(heads, len(rows), n_tokens, dtype=torch.float64)
    for head in range(heads):
        for length, rate in zip(SEGMENTS, RATES, strict=True):
            mine = offset(head, rate, heads)
            kept = (rows // length).unsqueeze(1) == keys // length
            kept &= (rows % length % rate == mine).unsqueeze(1) & (keys % length % rate == mine)
            total[head] += kept & (keys <= rows.unsqueeze(1)) if is_causal else kept
    return total


def exact_rows(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, counted: Tensor) -> Tensor:
    """Sampled rows of attention in which a pair counts ``counted`` times."""
    scores = q[:, :, rows] @ k.mT * q.shape[-1] ** -0.5
    return torch.softmax(scores + counted.log(), -1) @ v


def relative_error(actual: Tensor, exact: Tensor) -> float:
    error = ((actual.double() - exact).norm() / exact.norm()).item()
    return math.inf if math.isnan(error) else error


def errors(attention: Attention, inputs: list[Tensor], grad: Tensor, counted: Tensor, rows: Tensor) -> list[float]:
    """Relative L2 errors of the output and the gradients of q, k and v, over sampled rows."""
    leaves = [x.detach().double().requires_grad_() for x in inputs]
    expected = exact_rows(*leaves, rows, counted)
    exact = [expected.detach(), *torch.autograd.grad(expected, leaves, grad[:, :, rows].double())]
    rows_grad = torch.zeros_like(grad)
    rows_grad[:, :, rows] = grad[:, :, rows]
    out = attention(*inputs)
    got = [out.detach()[:, :, rows], *torch.autograd.grad(out, inputs, rows_grad)]
    return [relative_error(mine, right) for mine, right in zip(got, exact, strict=True)]


class _Flash(torch.autograd.Function):
    """Torch's flash kernel for CPUs in flash-attention's shapes, ``[B, N, H, D]`` with lse ``[B, H, N]``."""

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


def eager_flash(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """The same in matrix products that torch differentiates."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    lse = scores.logsumexp(-1)
    return ((scores - lse.unsqueeze(-1)).exp() @ v).transpose(1, 2), lse


STAND_INS = {"flash": _Flash.apply, "eager": eager_flash}


def torchscale_attention(args: argparse.Namespace) -> Attention:
    """torchscale's LongNet from q, k and v ``[B, H, N, D]`` to the output, without its projections."""
    heads, is_causal, stand_in = args.heads, args.causal, STAND_INS[args.stand_in]
    sys.path[:0] = [str(folder) for folder in args.torchscale]
    theirs = importlib.import_module("torchscale.component.dilated_attention")
    base = importlib.import_module("torchscale.component.multihead_attention")
    base.flash_attn_func = lambda q, k, v, dropout, bias, scale, causal: stand_in(q, k, v, causal)
    module = theirs.DilatedAttention.__new__(theirs.DilatedAttention)
    torch.nn.Module.__init__(module)
    module.num_heads, module.head_dim, module.dropout = heads, args.head_dim, 0.0
    module.args = SimpleNamespace(dilated_ratio=list(RATES), segment_length=list(SEGMENTS), flash_attention=True)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        outs, lses = [], []
        for length, rate in zip(SEGMENTS, RATES, strict=True):
            pieces = [module.gathering(x, rate, length, is_causal=is_causal, seq_parall=False) for x in (q, k, v)]
            out, lse = module.attention_ops(*pieces, is_causal=is_causal)
            outs.append(out)
            lses.append(lse)
        joined: Tensor = module.scattering(outs, lses, q.shape[1], q.shape[0])
        return joined.unflatten(-1, (heads, args.head_dim)).transpose(1, 2)

    return attention


def make_inputs(args: argparse.Namespace, n_tokens: int) -> tuple[list[Tensor], Tensor]:
    """q, k and v, and a gradient of the output, laid out ``[B, N, H, D]`` as projections give them."""
    generator = torch.Generator().manual_seed(args.seed)
    made = [torch.randn(1, n_tokens, args.heads, args.head_dim, generator=generator).transpose(1, 2) for _ in range(4)]
    return [x.requires_grad_() for x in made[:3]], made[3]


def step(attention: Attention, inputs: list[Tensor], grad: Tensor) -> tuple[float, float]:
    """Seconds of one forward and one backward pass."""
    began = time.perf_counter()
    out = attention(*inputs)
    middle = time.perf_counter()
    torch.autograd.grad(out, inputs, grad)
    return middle - began, time.perf_counter() - middle


def entrants(args: argparse.Namespace) -> dict[str, Attention]:
    """Who takes part; torchscale where it can be imported."""
    found: dict[str, Attention] = {}
    for overlap in ("mix", "union"):
        found[f"ringtile {overlap}"] = partial(
            dilated_attention,
            segment_lengths=SEGMENTS,
            dilation_rates=RATES,
            is_causal=args.causal,
            overlap=overlap,
        )
    if args.torchscale:
        try:
            found["torchscale"] = torchscale_attention(args)
        except ImportError as error:
            print(f"torchscale is left out: {error}")
    return found


def check(args: argparse.Namespace, attentions: dict[str, Attention]) -> dict[str, list[float]]:
    """Errors of each against float64; ends the run where ours exceed `BOUND`."""
    inputs, grad = make_inputs(args, args.checked_tokens)
    rows = torch.randperm(args.checked_tokens, generator=torch.Generator().manual_seed(1))[:CHECKED_ROWS]
    found = {}
    for name, attention in attentions.items():
        offset = torchscale_offset_of if name == "torchscale" else offset_of
        counted = counts(rows, args.checked_tokens, args.heads, args.causal, offset)
        counted = counted.clamp(max=1) if name.endswith("union") else counted
        found[name] = errors(attention, inputs, grad, counted, rows)
        print(f"{name:16} errors of out, dq, dk, dv: " + " ".join(f"{error:.1e}" for error in found[name]), flush=True)
        checked = found[name][:1] if name == "torchscale" else found[name]
        if max(checked) > BOUND:
            raise SystemExit(f"{name} is wrong: over {BOUND}; nothing is timed")
    return found


def dense(args: argparse.Namespace) -> Attention:
    return partial(F.scaled_dot_product_attention, is_causal=args.causal)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--dense-tokens", type=int, default=16384)
    parser.add_argument("--checked-tokens", type=int, default=16384, help="length of the check against float64")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--torchscale", type=Path, action="append", help="a folder to import torchscale or einops from")
    parser.add_argument("--stand-in", choices=STAND_INS, default="flash", help="for torchscale's flash-attention")
    parser.add_argument(
        "--memory", action="store_true", help="measure peak memory at a quarter of the length and at it"
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    attentions = entrants(args)
    record: dict[str, Any] = {
        "commit": commit(),
        "versions": versions(),
        "machine": machine_facts(),
        "problem": {name: value for name, value in vars(args).items() if name not in ("torchscale", "json")},
        "segment_lengths": SEGMENTS,
        "dilation_rates": RATES,
        "errors": check(args, attentions),
    }

    inputs, grad = make_inputs(args, args.tokens)
    dense_inputs, dense_grad = make_inputs(args, args.dense_tokens)
    scale = (args.tokens / args.dense_tokens) ** 2
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in (*attentions, "dense")}
    for number in range(args.rounds):
        order = list(seconds)
        for name in order[number % len(order) :] + order[: number % len(order)]:
            if name == "dense":
                forward, backward = step(dense(args), dense_inputs, dense_grad)
                seconds[name].append((forward * scale, backward * scale))
            else:
                seconds[name].append(step(attentions[name], inputs, grad))
    totals = {name: statistics.median(sum(one) for one in each) for name, each in seconds.items()}
    record["seconds"] = seconds
    for name, each in seconds.items():
        forward, backward = (statistics.median(part) for part in zip(*each, strict=True))
        note = f"  (from {args.dense_tokens:,} tokens, times {scale:g})" if name == "dense" else ""
        ratio = totals[name] / totals["ringtile mix"]
        print(f"{name:16} forward {forward:8.2f} s  backward {backward:8.2f} s  {ratio:6.2f} x ours{note}", flush=True)

    if args.memory:
        record["peak_bytes"] = {}
        for n_tokens in (args.tokens // 4, args.tokens):
            inputs, grad = make_inputs(args, n_tokens)
            for name, attention in attentions.items():
                backward = partial(torch.autograd.grad, inputs=inputs, grad_outputs=grad)
                peaks = peak_memory(partial(attention, *inputs), backward, torch.device("cpu"))
                record["peak_bytes"][f"{name} {n_tokens}"] = peaks
                print(
                    f"{name:16} {n_tokens:7,} tokens: peak beyond inputs, output and gradients, in tensors like q: "
                    + ", ".join(f"{(peak or 0) / grad.nbytes:.2f} {way}" for way, peak in peaks._asdict().items()),
                    flush=True,
                )
    if args.json:
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
