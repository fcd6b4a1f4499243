"""Compile FlexAttention's own Triton templates ahead of time, with the constants that inductor would give them."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jinja2
import torch
import triton
from torch._inductor.template_heuristics.triton import CUDAConfigHeuristic
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TEMPLATES = Path(torch.__file__).parent / "_inductor/kernel/flex/templates"
MASKS = {
    "full": "{out} = tl.full([1], True, tl.int1)",
    "causal window": "{out} = (({m}) >= ({n})) & ((({m}) - ({n})) < 1024)",
    "documents": "{out} = (({m}) >= ({n})) & (tl.load(document + ({m})) == tl.load(document + ({n})))",
    "LongNet": (
        "{out} = (({m}) // 2048 == ({n}) // 2048)"
        " | (({m}) // 8192 == ({n}) // 8192) & (({m}) % 4 == ({n}) % 4)"
    ),
}  # fmt: skip
"""Masks by name, as inductor writes a ``mask_mod``."""

TOKENS, HEADS, BLOCK = 8192, 4, 128
_LISTS = ("KV_NUM_BLKS", "KV_IDX", "Q_NUM_BLKS", "Q_IDX", "FULL_KV_NUM_BLKS", "FULL_KV_IDX")
_NAMES = {
    "flex_attention": ["Q", "K", "V", "LSE", "MAX", *_LISTS[:2], *_LISTS[4:]],
    "flex_backwards": ["Q", "K", "V", "LSE", "DELTA", "DO", "DQ", "DV", *_LISTS, "FULL_Q_NUM_BLKS", "FULL_Q_IDX"],
}


def defaults(template: str, architecture: int, head_dim: int) -> dict[str, int]:
    """Return inductor's own choice of tiles, stages and warps for bfloat16."""
    with patch("torch.cuda.get_device_capability", return_value=divmod(architecture, 10)):
        heuristic = CUDAConfigHeuristic()
        if template == "flex_attention":
            one = heuristic.get_flex_attn_fwd_configs(head_dim, torch.bfloat16)[-1]
            tiles = {"BLOCK_M": one.block_m, "BLOCK_N": one.block_n}
        else:
            one = heuristic.get_flex_attn_bwd_configs(head_dim, torch.bfloat16)[-1]
            tiles = {f"BLOCK_{name.upper()}": getattr(one, f"block_{name}") for name in ("m1", "n1", "m2", "n2")}
    return {**tiles, "num_stages": one.num_stages, "num_warps": one.num_warps}


def _source(template: str, mask: str, options: dict[str, Any], head_dim: int) -> tuple[str, list[str]]:
    names = _NAMES[template]
    arguments = [f"arg_{name}" for name in names] + ["out_ptr0"] + ["document"] * (mask == "documents")
    dense = [HEADS * TOKENS * head_dim, TOKENS * head_dim, head_dim, 1]
    blocks = TOKENS // BLOCK
    strides = dict.fromkeys((*names, "OUT"), dense)
    for name in names:
        if name.endswith("NUM_BLKS"):
            strides[name] = [blocks, blocks, 1]
        elif name.endswith("IDX"):
            strides[name] = [blocks * blocks, blocks * blocks, blocks, 1]
    sizes = {name: [1, HEADS, TOKENS, head_dim] for name in names} | {"KV_NUM_BLKS": [1, 1, blocks]}
    constants = "".join(f"    {name} : tl.constexpr = {value}\n" for name, value in options.items() if name.isupper())
    constants += "    INDEX_DTYPE : tl.constexpr = tl.int32\n"

    def def_kernel(*_: str) -> str:
        head = f"@triton.jit\ndef kernel({', '.join(arguments)}):"
        return "\n".join(
            [
                "import triton\nimport triton.language as tl\nimport math\n",
                head,
                constants,
                *(f"    {name} = arg_{name}" for name in names),
            ]
        )

    def modification(subgraph_number: int, output_name: str, **given: str) -> str:
        backward = template == "flex_backwards"
        if subgraph_number == 1 + backward:
            return MASKS[mask].format(m=given["m"], n=given["n"], out=output_name)
        kept = {0: "score", 1: "grad_score_mod"}.get(subgraph_number)
        return f"{output_name} = ({given[kept]})" if kept else "pass"

    def store_output(index: list[str], value: str, where: str, **_: Any) -> str:
        place = " + ".join(f"({at})*{stride}" for at, stride in zip(index, strides["OUT"], strict=True))
        return f"tl.store(out_ptr0 + {place}, {value}, {where})"

    def stride(name: str, dim: int | None = None) -> str:
        return ", ".join(map(str, strides[name])) if dim is None else str(strides[name][dim])

    environment = jinja2.Environment(undefined=jinja2.StrictUndefined)
    environment.filters["indent_except_first"] = lambda text, count: text.replace("\n", "\n" + "    " * count)
    parts = [template, "utilities", *(["common"] if template == "flex_attention" else [])]
    text = "".join((TEMPLATES / f"{part}.py.jinja").read_text() for part in parts)
    rendered = environment.from_string(text).render(
        **options,
        def_kernel=def_kernel,
        modification=modification,
        store_output=store_output,
        stride=stride,
        size=lambda name, dim: str(sizes[name][dim]),
        gen_argdefs=lambda: ", ".join(arguments),
        gen_defines=lambda: constants.replace("    ", "").rstrip("\n"),
    )
    return rendered, arguments


def compiled(template: str, architecture: int, head_dim: int, mask: str) -> tuple[Any, dict[str, int]]:
    """Compile one template for a mask. Return Triton's kernel and the choice of tiles."""
    choice = defaults(template, architecture, head_dim)
    flags = ("PRESCALE_QK", "ROWS_GUARANTEED_SAFE", "BLOCKS_ARE_CONTIGUOUS", "OUTPUT_MAX", "USE_TMA")
    options: dict[str, Any] = {
        **dict.fromkeys(flags, False),
        **dict.fromkeys(("WRITE_DQ", "OUTPUT_LOGSUMEXP", "IS_DIVISIBLE", "HAS_FULL_BLOCKS", "SAFE_HEAD_DIM"), True),
        **{f"{name}_HEAD_DIM{end}": head_dim for name in ("QK", "V") for end in ("", "_ROUNDED")},
        "FLOAT32_PRECISION": "'tf32'",
        "SM_SCALE": head_dim**-0.5,
        "GQA_SHARED_HEADS": 1,
        "SPARSE_Q_BLOCK_SIZE": BLOCK,
        "SPARSE_KV_BLOCK_SIZE": BLOCK,
        **{name: value for name, value in choice.items() if name.isupper()},
    }
    text, arguments = _source(template, mask, options, head_dim)
    types = {"arg_LSE": "*fp32", "arg_MAX": "*fp32", "arg_DELTA": "*fp32", "document": "*i64"}
    signature = {
        name: types.get(name, "*i32" if name.endswith(("BLKS", "IDX")) else "*bf16") for name in arguments
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        # Triton reads a kernel's source from its file.
        path = Path(folder, f"flex_{hashlib.sha256(text.encode()).hexdigest()[:12]}.py")
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)  # type: ignore[union-attr]
        aligned = {(number,): [["tt.divisibility", 16]] for number in range(len(signature))}
        source = ASTSource(module.kernel, signature, {}, aligned)
        launch = {name: choice[name] for name in ("num_warps", "num_stages")}
        return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=launch), choice
