"""A changed transformers: ringtile computes what its eager attention does, or refuses in one line (`make drift`)."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [
    # The numbers of calls and steps are those of one version.
    pytest.mark.skipif(importlib.metadata.version("transformers") != "5.24.0", reason="the changes are of 5.24.0"),
    pytest.mark.skipif(sys.platform != "linux", reason="forks processes that have imported torch"),
]

SAMPLE = """
right: drop keyword | models/gemma3/modeling_gemma3.py | Gemma3Attention.forward | 8 dropout | gemma3
right: drop parameter |  | MistralForCausalLM.forward | inputs_embeds | context parallel
right: new default | masking_utils.py | eager_mask | q_offset 1 | mpnet
right: rename field |  |  | use_cache | pack
right: rename local | masking_utils.py | and_masks | mask_functions | gpt-oss
right: rename name |  |  | or_masks | gemma3 with images
refused: drop attribute | models/swin/modeling_swin.py | SwinAttention | attention_dropout | swin
refused: move mask | models/gemma3/modeling_gemma3.py | Gemma3Attention.forward | 8 attention_mask \
models/gemma3/modeling_gemma3.py::eager_attention_forward | gemma3
refused: new argument | models/t5/modeling_t5.py | T5Attention.forward | 16 \
models/t5/modeling_t5.py::T5Attention.compute_bias | t5
refused: drop parameter |  | T5Attention._relative_position_bucket | max_distance | t5
refused: swap steps | models/minimax_m3_vl/modeling_minimax_m3_vl.py | MiniMaxM3VLIndexer.forward | 7 \
| losses minimax m3
refused: change constant | models/qwen4_exp/modeling_qwen4_exp.py | Qwen4ExpTextQSAIndexer.forward | 6 | qwen4
refused: rename argument |  |  | attention_dists | granite speech
refused: rename argument |  |  | kv_length | beams
refused: rename attribute |  |  | register | mpnet
refused: rename attribute |  |  | tokens_per_page | serving llama
refused: rename field |  |  | head_dim | serving int8
refused: rename field |  |  | model_type | llama
refused: rename field |  |  | num_attention_heads | calibrate
refused: rename name |  |  | LongformerSelfAttention | longformer
"""
"""Changes by their outcome, as `scripts/drift.py --change` reads them."""


def test_a_changed_transformers_is_right_or_refused() -> None:
    expected = [line.partition(": ")[::2] for line in SAMPLE.strip().splitlines()]
    command = [sys.executable, "scripts/drift.py", *(word for _, change in expected for word in ("--change", change))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(result["outcome"], result["change"]) for result in results] == expected, (results, done.stderr)
    assert done.returncode == 0
