"""Make a dense decoder sparse: add an indexer to each layer, train it on the layer's own attention, then without it.

    python examples/train_indexer.py --model SmolLM2-135M-Instruct.Q4_1.gguf --save indexers.pt --plot curve.png

Without --model, it makes a small Llama with random weights that reads bytes. Without a file, the indexers learn from
modules of Python's library. In the warm-up only they learn, from dense attention. Then attention is sparse, and they
learn from the keys that they choose. With --lora, the model learns to live with them, too. At the end, the key-value
heads of all layers share out their keys by need.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from ringtile.adaptive import IndexedAttention, share_keys
from ringtile.integrations.transformers import use_ringtile
from ringtile.tools.quality.texts import Texts

TEXTS = "asyncio.base_events asyncio.events datetime email.message ftplib gettext http.server imaplib".split()
TEXTS += "locale nntplib pickle platform plistlib poplib pprint pydoc shelve socket sqlite3.dump textwrap".split()
TEXTS += "threading trace unittest.case urllib.request uuid webbrowser xml.dom.minidom xmlrpc.client".split()
HELD_OUT = ("calendar", "smtplib", "unittest.loader", "csv")
"""Modules of Python. Those that `ringtile quality` judges by are not among them."""


def text_of(modules: Sequence[str]) -> str:
    """Return the sources of modules of Python."""
    specs: list[Any] = [importlib.util.find_spec(module) for module in modules]
    return "\n\n".join(spec.loader.get_source(spec.name) for spec in specs)


def load(path: str | None) -> tuple[Any, Callable[[str], list[int]]]:
    """Return a model and its tokenizer. A token of the small model is a byte."""
    if path is None:
        sizes = dict(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2)
        config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=16, initializer_range=0.2)
        return AutoModelForCausalLM.from_config(config), lambda text: list(text.encode())
    where = {"gguf_file": Path(path).name} if Path(path).is_file() else {}
    source = str(Path(path).parent) if where else path
    tokenizer = AutoTokenizer.from_pretrained(source, **where)
    model = AutoModelForCausalLM.from_pretrained(source, **where)
    return model, lambda text: list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def rows_of(tokens: list[int], context: int) -> Tensor:
    """Return rows ``[rows, context]``. The last quarter of every other row repeats its first: heads that copy learn."""
    if len(tokens) < 2 * context:
        raise SystemExit(f"the text has {len(tokens):,} tokens: too few for two rows of --context {context}")
    rows = torch.tensor(tokens[: len(tokens) // context * context]).view(-1, context)
    rows[1::2, -(context // 4) :] = rows[1::2, : context // 4]
    return rows


def add_indexers(model: Any, keys: int, dim: int, drawn: int) -> nn.ModuleList:
    """Switch a model to attention over the keys that an indexer per layer chooses, and return the indexers."""
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    sizes = {"num_kv_heads": config.num_key_value_heads, "dim": dim, "rows": drawn}
    attends = nn.ModuleList(
        IndexedAttention(config.num_attention_heads, head_dim, keys, **sizes) for _ in range(config.num_hidden_layers)
    )
    use_ringtile(model, attend=attends)
    return attends


def mean_loss(attends: nn.ModuleList) -> Tensor:
    return torch.stack([each.loss for each in attends]).mean()  # type: ignore[union-attr, arg-type]


def train(
    model: Any, attends: nn.ModuleList, rows: Tensor, held_out: Tensor, args: argparse.Namespace
) -> list[tuple[int, str, float]]:
    """Train the indexers, and return steps, kinds and losses. The best of the held-out losses stays."""
    model.requires_grad_(False)
    parameters = list(attends.parameters())
    if args.lora:
        from peft import LoraConfig, inject_adapter_in_model

        inject_adapter_in_model(LoraConfig(r=args.lora, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]), model)
        parameters += [x for x in model.parameters() if x.requires_grad]
    optimizer = torch.optim.Adam(parameters, args.rate, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.warm_up + args.steps, args.rate / 10)
    curve: list[tuple[int, str, float]] = []
    best: tuple[float, dict[str, Tensor]] = math.inf, {}
    begin = time.perf_counter()

    def note(step: int, kind: str, loss: float) -> None:
        curve.append((step, kind, loss))
        print(f"step {step}: {kind} {loss:.4f}, {time.perf_counter() - begin:.0f} s", flush=True)

    if not attends[0].started:
        # The maps start from text to learn from, not from what is held out.
        for each in attends:
            each.train().warm_up = True
        model(rows[-1:], use_cache=False, logits_to_keep=1)
    for step in range(args.warm_up + args.steps + 1):
        sparse = step >= args.warm_up and args.steps > 0
        for each in attends:
            each.train().warm_up = not sparse
        model.train(sparse and bool(args.lora))
        if step % args.every == 0 or step in (args.warm_up, args.warm_up + args.steps):
            # The same rows are drawn for each step, so that steps differ by the indexers alone.
            with torch.random.fork_rng():
                torch.manual_seed(1)
                found = 0.0
                for row in held_out:
                    model(row[None], use_cache=False, logits_to_keep=1)
                    found += mean_loss(attends).item() / len(held_out)
            note(step, "held out, chosen keys" if sparse else "held out", found)
            if sparse and step == args.warm_up:
                # The losses over all keys and over the chosen ones are different numbers.
                best = math.inf, {}
            if found < best[0]:
                best = found, {name: x.clone() for name, x in attends.state_dict().items()}
        if step == args.warm_up + args.steps:
            break
        row = rows[step % len(rows)][None]
        language = model(row, labels=row, use_cache=False).loss if sparse and args.lora else None
        if language is None:
            model(row, use_cache=False, logits_to_keep=1)
        loss = mean_loss(attends)
        optimizer.zero_grad()
        (loss if language is None else loss + language).backward()
        optimizer.step()
        schedule.step()
        if sys.stderr.isatty():
            print(f"step {step}: {loss.item():.4f}", end="\r", file=sys.stderr)
    if not args.lora:
        attends.load_state_dict(best[1])
    return curve


def share(model: Any, attends: nn.ModuleList, rows: Tensor, keys: int) -> None:
    """Share out keys by what some rows lose, and print the counts of the key-value heads of all layers."""
    model.eval()
    use_ringtile(model, attend=attends.eval())
    modules: list[Any] = list(attends)
    share_keys(modules, keys, lambda: [model(row[None], use_cache=False, logits_to_keep=1) for row in rows])
    print(f"{keys} keys, shared out: " + ", ".join(" ".join(map(str, each.keys)) for each in modules), flush=True)


@torch.no_grad()
def judge(
    model: Any, attends: nn.ModuleList, rows: Tensor, texts: Texts, tokens: int, keys: Sequence[int]
) -> dict[str, list[float]]:
    """Return what numbers of keys keep of the dense model, in %: perplexity of text, benefit of a copy, needles."""

    def means(drawn: Any) -> list[float]:
        parts = (drawn.first, drawn.between, drawn.second, drawn.answers)
        places = torch.cat(parts)
        logits = model(drawn.ids, use_cache=False, logits_to_keep=places).logits[0].float()
        wanted = drawn.ids[0, places + 1]
        nats = nn.functional.cross_entropy(logits, wanted, reduction="none").split([len(part) for part in parts])
        right = (logits.argmax(1) == wanted)[-len(drawn.answers) :].float().mean()
        return [*(float(x.mean()) for x in nats[:3]), float(right)]

    found: dict[str, list[float]] = {}
    model.eval().set_attn_implementation("sdpa")
    sequences = [texts.far_copy(seed, tokens) for seed in range(len(texts.sources))]
    references = [means(drawn) for drawn in sequences]
    for count in keys:
        share(model, attends, rows, count)
        for kind, drawn, dense in zip(texts.sources, sequences, references, strict=True):
            ours = means(drawn)
            text, copy = math.exp(dense[1] - ours[1]), (dense[0] - ours[2]) / (dense[0] - dense[2])
            kept = [text, copy, ours[3] / (dense[3] or math.nan)]
            found[f"{kind} {count}"] = [100 * x for x in kept]
            print(f"{kind}, {count} keys: " + " / ".join(f"{100 * x:.1f}" for x in kept), flush=True)
        columns = zip(*(value for name, value in found.items() if name.endswith(f" {count}")), strict=True)
        shown = " / ".join(f"{sum(column) / len(column):.1f} ({min(column):.1f})" for column in columns)
        counts = [min(n, tokens) for each in attends for n in each.keys]  # type: ignore[union-attr]
        density = sum(n * (2 * tokens - n + 1) for n in counts) / (tokens * (tokens + 1) * len(counts))
        print(f"{count} keys, density {density:.3f}: text / copy / needles kept, % (worst): {shown}", flush=True)
    return found


def plot(curve: Sequence[tuple[int, str, float]], path: Path) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.5), layout="constrained")
    for kind in dict.fromkeys(kind for _, kind, _ in curve):
        steps, losses = zip(*((step, loss) for step, name, loss in curve if name == kind), strict=True)
        axes.plot(steps, losses, marker="o", label=kind)
    axes.set(xlabel="step", ylabel="KL divergence, nats", ylim=(0, None))
    axes.legend()
    figure.savefig(path, dpi=150)


def main(argv: Sequence[str] | None = None) -> list[tuple[int, str, float]]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path, nargs="?", help="text to learn from; the last tenth is held out")
    parser.add_argument("--model", help="name, folder or GGUF file of a causal language model")
    parser.add_argument("--context", type=int, default=1024, help="tokens of a row (%(default)s)")
    parser.add_argument("--keys", type=int, default=64, help="keys of a query, the mean of all heads (%(default)s)")
    parser.add_argument("--dim", type=int, default=16, help="length of the indexers' vectors (%(default)s)")
    parser.add_argument("--warm-up", type=int, default=20, help="steps with dense attention (%(default)s)")
    parser.add_argument("--steps", type=int, default=5, help="steps with sparse attention (%(default)s)")
    parser.add_argument("--every", type=int, default=10, help="steps between held-out losses (%(default)s)")
    parser.add_argument("--held-out", type=int, default=2, help="rows of held-out losses (%(default)s)")
    parser.add_argument("--rows", type=int, default=256, help="drawn queries of a step and layer (%(default)s)")
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate (%(default)s)")
    parser.add_argument("--lora", type=int, default=0, help="rank of LoRA in the sparse steps, 0 for none")
    parser.add_argument("--bf16", action="store_true", help="hold the model in bfloat16")
    parser.add_argument("--save", type=Path, help="file of the indexers' weights")
    parser.add_argument("--load", type=Path, help="file to start from")
    parser.add_argument("--plot", type=Path, help="picture of the curve")
    parser.add_argument("--judge", type=int, nargs="*", default=[], help="numbers of keys to judge, after training")
    parser.add_argument("--judge-tokens", type=int, default=4096, help="tokens of a text to judge by (%(default)s)")
    parser.add_argument("--judge-texts", type=Path, nargs="*", default=[], help="text files, in place of Python's own")
    args = parser.parse_args(argv)
    if args.file and not args.file.is_file():
        parser.error(f"file: expected a text file, got {str(args.file)!r}")
    torch.manual_seed(0)
    model, encode = load(args.model)
    model.to(torch.bfloat16 if args.bf16 else torch.float32).eval()
    attends = add_indexers(model, args.keys, args.dim, args.rows)
    if args.load:
        attends.load_state_dict(torch.load(args.load, weights_only=True))
        for each in attends:
            each.keys = args.keys
    if args.file:
        tokens = encode(args.file.read_text(encoding="utf-8"))
        cut = len(tokens) // 10
        texts = [tokens[:-cut], tokens[-cut:]]
    else:
        texts = [encode(text_of(TEXTS)), encode(text_of(HELD_OUT))]
    rows, held_out = (rows_of(tokens, args.context) for tokens in texts)
    rows = rows[torch.randperm(len(rows))]
    curve = train(model, attends, rows, held_out[: args.held_out], args)
    share(model, attends, rows[-2:], args.keys)
    if args.save:
        torch.save(attends.state_dict(), args.save)
    if args.plot:
        plot(curve, args.plot)
    if args.judge:
        judge(model, attends, rows[-2:], Texts(encode, args.judge_texts), args.judge_tokens, args.judge)
    return curve


if __name__ == "__main__":
    main()
