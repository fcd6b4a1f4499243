"""Compare the prefill of a model by ringtile and by OpenVINO GenAI, dense and sparse: seconds, and what is kept.

    pip install --target DIR openvino-genai
    python benchmarks/openvino_prefill.py MODEL.gguf --openvino DIR

OpenVINO's sparse prefill is XAttention (Xu et al., arXiv:2503.16428). It has a threshold for the scores of tiles, and
tells no density. Both engines get the tokens that `ringtile quality` judges by, and the same weights: OpenVINO would
round the offsets of 4-bit weights, so it reads them as float16, from a file that this program writes. Prefills take
turns in one process, and medians count. OpenVINO tells the probability of each token of a prompt, not the likeliest
one, so needles count the probability of the right digits. The run ends if the dense engines disagree about the text.
What was judged before is read from the folder of ``--out``, so a later run can time alone.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.metadata
import json
import math
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from functools import partial
from itertools import count as numbers
from pathlib import Path
from typing import Any, Protocol

import torch
from pages import Table, table_lines
from torch import Tensor

from ringtile.integrations.transformers import use_ringtile
from ringtile.tools.machine import busy_warning, origin
from ringtile.tools.quality.decoder import Decoder
from ringtile.tools.quality.leg import Leg, Variant
from ringtile.tools.quality.texts import FarCopy
from ringtile.tools.quality.watched import Watched
from ringtile.tools.record import whole, write_whole
from ringtile.tools.timing import interleaved
from ringtile.tools.units import count

TOKENS, DENSITIES, THRESHOLDS = (4096, 8192), (0.25, 0.1), (0.8, 0.9)
AGREE = 0.02
"""Nats per token by which the dense engines may differ: they round differently."""
FIGURES = ("text", "copy", "needles")
PRECISIONS = {"bfloat16": "bf16", "float32": "f32"}
"""OpenVINO's names of dtypes."""


class Engine(Protocol):
    """A model with some attention."""

    def seconds(self, ids: Tensor) -> float:
        """Return the time of a prefill with the logits of the last token."""

    def nats(self, ids: Tensor, positions: Tensor) -> tuple[Tensor, float | None]:
        """Return the losses of the tokens after some positions, and the tile density, if the engine tells it."""


class Ours:
    """The model of transformers with PyTorch's own attention, or with ringtile's at a density."""

    def __init__(self, leg: Leg, density: float | None) -> None:
        self.decoder = leg.decoder
        self.attends = None if density is None else leg.attends(Variant("default", "calibrated", density))

    def seconds(self, ids: Tensor) -> float:
        self._use(self.attends)
        began = time.perf_counter()
        self.decoder.run(ids)
        return time.perf_counter() - began

    def nats(self, ids: Tensor, positions: Tensor) -> tuple[Tensor, float | None]:
        watched = None if self.attends is None else [Watched(attend) for attend in self.attends]
        self._use(watched)
        found, _ = self.decoder.losses(ids, positions)
        return found, 1.0 if watched is None else statistics.mean(each.density[0] for each in watched)

    def _use(self, attends: Sequence[Any] | None) -> None:
        if attends is None:
            self.decoder.model.set_attn_implementation("sdpa")
        else:
            use_ringtile(self.decoder.model, attend=attends)


class Theirs:
    """The model of OpenVINO GenAI, dense or with the threshold of XAttention."""

    def __init__(self, args: argparse.Namespace, file: Path, threshold: float | None) -> None:
        self.genai, self.openvino = (importlib.import_module(name) for name in ("openvino_genai", "openvino"))
        scheduler = self.genai.SchedulerConfig()
        # The whole prompt is one batch, and no prompt before it serves it.
        scheduler.max_num_batched_tokens, scheduler.enable_prefix_caching = 2 * max(args.tokens), False
        scheduler.cache_size = 1
        if threshold is not None:
            scheduler.use_sparse_attention = True
            config = scheduler.sparse_attention_config
            config.mode, config.xattention_threshold = self.genai.SparseAttentionMode.XATTENTION, threshold
            config.xattention_block_size, config.xattention_stride = args.xattention_block, args.xattention_stride
        options = {"INFERENCE_NUM_THREADS": args.threads, "INFERENCE_PRECISION_HINT": PRECISIONS[args.dtype]}
        self.pipeline = self.genai.ContinuousBatchingPipeline(file, scheduler, "CPU", options)
        self.numbers = numbers()

    def seconds(self, ids: Tensor) -> float:
        began = time.perf_counter()
        self._generate(ids, echo=False)
        return time.perf_counter() - began

    def nats(self, ids: Tensor, positions: Tensor) -> tuple[Tensor, float | None]:
        found = -torch.tensor(self._generate(ids, echo=True).generated_log_probs)
        # The echo has the prompt's tokens, and the one after it.
        assert len(found) == ids.shape[1] + 1
        return found[positions + 1], None

    def _generate(self, ids: Tensor, echo: bool) -> Any:
        config = self.genai.GenerationConfig()
        config.max_new_tokens, config.do_sample, config.echo, config.logprobs = 1, False, echo, int(echo)
        handle = self.pipeline.add_request(next(self.numbers), self.openvino.Tensor(ids.numpy()), config)
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
        (found,) = handle.read_all()
        return found


def in_float16(source: Path, target: Path) -> Path:
    """Write the weights of a GGUF file in float16, if they are not there, and return the new file."""
    gguf = importlib.import_module("gguf")
    if target.exists():
        return target
    reader, array = gguf.GGUFReader(source), gguf.GGUFValueType.ARRAY
    with whole(target) as draft:
        writer = gguf.GGUFWriter(draft, reader.fields["general.architecture"].contents())
        for name, field in reader.fields.items():
            # The writer counts by itself, and has the architecture already.
            if not name.startswith("GGUF.") and name != "general.architecture":
                value = int(gguf.LlamaFileType.MOSTLY_F16) if name == "general.file_type" else field.contents()
                writer.add_key_value(name, value, field.types[0], field.types[-1] if field.types[0] == array else None)
        for tensor in reader.tensors:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            is_float = tensor.tensor_type == gguf.GGMLQuantizationType.F32
            writer.add_tensor(tensor.name, values.astype("float32" if is_float else "float16"))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return target


def judged(engines: dict[str, Engine], text: FarCopy) -> dict[str, dict[str, Any]]:
    """Return the figures of each engine on a sequence, as parts of those of its own dense attention."""
    parts = (text.first, text.between, text.second, text.answers)
    found: dict[str, dict[str, Any]] = {}
    dense: dict[str, list[float]] = {}
    for name, engine in engines.items():
        nats, density = engine.nats(text.ids, torch.cat(parts))
        *losses, answers = nats.double().split([len(part) for part in parts])
        first, between, second, digits = means = [float(x.mean()) for x in (*losses, answers.neg().exp())]
        # The dense engine of each kind comes first.
        base = dense.setdefault(name.partition(",")[0], means)
        found[name] = {
            "text": math.exp(base[1] - between),
            "copy": (base[0] - second) / (base[0] - base[2]),
            "needles": digits / base[3],
            "nats": [first, between, second],
            "density": density,
        }
    texts = [means[1] for means in dense.values()]
    if max(texts) - min(texts) > AGREE:
        raise SystemExit(f"the dense engines disagree about {text.kinds[0]}: {texts} nats per token")
    return found


def remembered(engines: dict[str, Engine], text: FarCopy, args: argparse.Namespace) -> dict[str, Any]:
    """Return what `judged` does, from its file if there is one."""
    facts = (args.model.name, args.dtype, args.xattention_block, args.xattention_stride, *engines, text.sha256)
    file = args.out / f"judged-{hashlib.sha256(repr(facts).encode()).hexdigest()[:8]}.json"
    if not file.exists():
        write_whole(file, json.dumps(judged(engines, text)))
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def table(rows: list[dict[str, Any]], n_tokens: int) -> Table:
    """Return the table of a length."""
    lines = []
    for row in rows:
        if row["tokens"] == n_tokens:
            density = "-" if None in row["density"] else f"{statistics.mean(row['density']):.1%}"
            shares = [f"{100 * f(row[name]):.1f}" for name in FIGURES for f in (statistics.mean, min)]
            lines.append([row["name"], density, f"{row['seconds']:.2f}", f"{row['speedup']:.2f}x", *shares])
    heads = [f"{n_tokens:,} tokens", "tiles", "seconds", "against its dense"]
    return Table([*heads, *(f"{name} kept, %{worst}" for name in FIGURES for worst in ("", ", worst"))], lines, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model", type=Path, help="a GGUF file")
    add("--openvino", type=Path, required=True, metavar="DIR", help="the folder that openvino-genai is installed in")
    add("--tokens", type=count, nargs="+", default=TOKENS)
    add("--text", type=Path, nargs="+", default=(), help="texts, or folders of them (default: those of your Python)")
    add("--sequences", type=int, default=2, help="to judge by, at the shortest length (default: 2); fewer at others")
    add("--rounds", type=int, default=3, help="of prefills (default: 3)")
    add("--densities", type=float, nargs="*", default=DENSITIES, help="of ringtile (default: 0.25 0.1)")
    add("--thresholds", type=float, nargs="*", default=THRESHOLDS, help="of XAttention (default: 0.8 0.9)")
    add("--xattention-block", type=int, default=64, help="tile side of XAttention (default: 64)")
    add("--xattention-stride", type=int, default=8, help="of its sampled diagonals (default: 8)")
    add("--dtype", choices=tuple(PRECISIONS), default="bfloat16", help="of both engines (default: bfloat16)")
    add("--threads", type=int, default=torch.get_num_threads())
    add("--out", type=Path, default=Path("openvino"), help="folder of the record and what it needs (default: openvino)")
    args = parser.parse_args()
    # At the end, so that packages that both need are those of this environment.
    sys.path.append(str(args.openvino))
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    if warning := busy_warning():
        print(warning, file=sys.stderr)
    decoder = Decoder(str(args.model), min(args.tokens), args.text, getattr(torch, args.dtype))
    leg = Leg(decoder, args.out)
    engines: dict[str, Engine] = {"ringtile, dense (sdpa)": Ours(leg, None)}
    engines |= {f"ringtile, calibrated {density:.0%}": Ours(leg, density) for density in args.densities}
    file = in_float16(args.model, args.out / f"{args.model.stem}-float16.gguf")
    engines |= {"OpenVINO, dense": Theirs(args, file, None)}
    engines |= {f"OpenVINO, XAttention {threshold:g}": Theirs(args, file, threshold) for threshold in args.thresholds}
    rows = []
    for n_tokens in args.tokens:
        sequences = max(1, args.sequences * min(args.tokens) // n_tokens)
        texts = [decoder.texts.far_copy(seed, n_tokens) for seed in range(sequences)]
        found = [remembered(engines, text, args) for text in texts]
        for engine in engines.values():
            # A few tokens are enough to warm up.
            engine.seconds(texts[0].ids[:, :512])
        samples = {name: partial(engine.seconds, texts[0].ids) for name, engine in engines.items()}
        times = interleaved(samples, args.rounds)
        dense: dict[str, float] = {}
        for name, samples_of in times.items():
            seconds = statistics.median(samples_of)
            base = dense.setdefault(name.partition(",")[0], seconds)
            figures = {key: [each[name][key] for each in found] for key in (*FIGURES, "nats", "density")}
            row = {"tokens": n_tokens, "name": name, "seconds": seconds, "speedup": base / seconds, "times": samples_of}
            rows.append({**row, **figures, "texts": [text.kinds[0] for text in texts]})
        print("\n".join(table_lines(table(rows, n_tokens))), flush=True)
    theirs = importlib.metadata.version("openvino-genai")
    xattention = {"block": args.xattention_block, "stride": args.xattention_stride}
    record = {
        **origin(shlex.join(["python", *sys.argv])),
        "openvino_genai": theirs,
        "dtype": args.dtype,
        "xattention": xattention,
    }
    write_whole(args.out / "openvino.json", json.dumps({**record, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
