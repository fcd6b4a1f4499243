"""A changed transformers: ringtile computes what its eager attention does, or refuses in one line (`make drift`)."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = [
    # The numbers of calls and steps are those of one version.
    pytest.mark.skipif(importlib.metadata.version("transformers") != "5.24.0", reason="the changes are of 5.24.0"),
    pytest.mark.skipif(sys.platform != "linux", reason="forks processes that have imported torch"),
]

SAMPLE = {
    "rename": """
rename argument |  |  | relative_pos | deberta
rename argument |  |  | hidden_states_padded | longformer
rename field |  |  | use_cache | pack
rename field |  |  | num_hidden_layers | gpt-oss
rename local | masking_utils.py | blockwise_overlay | kv_group | gemma3 with images
rename local | masking_utils.py | packed_sequence_mask_function | batch_idx | packed llama4
rename name |  |  | or_masks | gemma3 with images
rename name |  |  | DeepseekV4Attention | losses deepseek v4
drop attribute | models/swin/modeling_swin.py | SwinAttention | is_causal | swin
drop keyword | models/gemma3/modeling_gemma3.py | Gemma3Attention.forward | 8 dropout | gemma3
""",
    "meaning": """
drop keyword | masking_utils.py | create_chunked_causal_mask | 4 config | llama4
drop parameter |  | MistralForCausalLM.forward | inputs_embeds | context parallel
new default | masking_utils.py | eager_mask | q_offset 1 | mpnet
swap steps | models/minimax_m3_vl/modeling_minimax_m3_vl.py | MiniMaxM3VLIndexer.forward | 7 | losses minimax m3
swap steps | models/qwen4_exp/modeling_qwen4_exp.py | Qwen4ExpTextQSAIndexer.forward | 12 | qwen4
swap steps | models/wavlm/modeling_wavlm.py | WavLMAttention.compute_bias | 1 | wavlm
""",
}
"""Changes by kinds, as `scripts/drift.py --change` reads them."""


@pytest.mark.parametrize("kinds", SAMPLE)
def test_a_changed_transformers_is_right_or_refused(kinds: str) -> None:
    changes = SAMPLE[kinds].strip().splitlines()
    command = [sys.executable, "scripts/drift.py", *(word for change in changes for word in ("--change", change))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert [result["change"] for result in results] == changes, done.stderr
    assert {result["outcome"] for result in results} <= {"right", "refused"}, results
    assert done.returncode == 0
