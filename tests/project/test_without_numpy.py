"""ringtile depends on torch alone: all of it works in an installation that has no numpy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

import ringtile
from ringtile.patterns.content import digest_of

WITHOUT_NUMPY = """
import sys, warnings
sys.modules["numpy"] = None
warnings.filterwarnings("ignore", "Failed to initialize NumPy")
import torch
try:
    torch.ones(2).numpy()
except RuntimeError as error:
    assert "Numpy is not available" in str(error)
else:
    raise AssertionError("torch has found a numpy")
"""
"""Before torch is imported, so that it believes that there is none."""

PATTERNS = """
from ringtile import build_index, dilated_attention, merge_attention, per_head, sparse_attention
from ringtile.patterns import *

def rule(head, query, key):
    return (query - key) % 3 == 0

tiles = torch.tensor([[True, False], [True, True]])
row_ptr, col = torch.tensor([0, 1, 3]), torch.tensor([0, 0, 1])
ids = torch.arange(400).view(2, 200) // 70
q, k, v = torch.randn(3, 2, 4, 200, 8).requires_grad_().unbind()
for pattern in (
    Dense(), Causal(), Window(20), Dilated([1, 3], 5), BlockDilated([1], 1), Strided(9), GlobalTokens(3),
    RandomBlocks(1), Segments(64, 2), Documents([150, 50]), Documents(cu_seqlens=torch.tensor([0, 150, 200])),
    Documents(ids=ids), Documents(ids=ids[0]), Blocks(tiles), Blocks(tiles.expand(4, 2, 2)),
    Blocks(row_ptr=row_ptr, col=col), Elements(rule), ~Window(3) & Causal(), per_head([Window(3)] * 4),
    longformer(8, 2), bigbird(), streaming(4, 16), longnet_union([64, 128], [1, 2]),
):
    for backend in (None, "blockwise", "reference"):
        out, lse = sparse_attention(q, k, v, Causal() & pattern, return_lse=True, backend=backend)
        (out.sum() + lse.clamp(min=-9).sum()).backward()
    assert pattern == pattern and hash(pattern) == hash(pattern)
    if pattern.batch_size is None:
        assert pattern.draw(200, width=10)
    build_index(pattern, 200, num_heads=4, batch=2).draw()
sparse_attention(q, k, v, tiles)
sparse_attention(q, k, v, Window(9), dropout_p=0.5, key_mask=torch.rand(2, 200) < 0.5)
for overlap in ("mix", "union"):
    dilated_attention(q, k, v, [64, 128], [1, 2], overlap=overlap).sum().backward()
"""

MODULES = """
from torch import nn
from ringtile import *
from ringtile.patterns import *

x = torch.randn(2, 150, 32)
mask = torch.rand(150, 150) < 0.5
for pattern in (None, Window(9), Causal() & Documents([100, 50])):
    module = SparseMultiheadAttention(32, 4, batch_first=True, pattern=pattern)
    for weights in (True, False):
        module(x, x, x, need_weights=weights, attn_mask=mask)[0].sum().backward()
        module(x, x, x, need_weights=weights, attn_mask=mask.expand(8, -1, -1))
        module(x, x, x, need_weights=weights, key_padding_mask=mask[:2])
    module(x, x, x, need_weights="block_sparse")
layer = replace_attention(nn.TransformerEncoderLayer(32, 4, batch_first=True), pattern=Window(9))
layer(x, src_mask=mask).sum().backward()
for attend in (sparse_attention, longnet_attend([64, 128], [1, 2])):
    transformer = SparseTransformer(2, 32, 4, is_causal=True, attend=attend, gradient_checkpointing=True)
    transformer(x).sum().backward()
transformer = SparseTransformer(1, 32, 4, is_causal=True, pattern=streaming(2, 20))
SparseLanguageModel(9, transformer).eval().generate(torch.zeros(1, 30).long(), 3)
"""

COMMANDS = """
from ringtile.cli import main

for pattern in ("documents([300, 212])", "causal & (window(64) | global_tokens(4))", "random_blocks(1)"):
    assert main(["show", pattern, "--tokens", "512"]) == 0
assert main(["doctor"]) in (0, 1)
"""


def test_all_of_it_works() -> None:
    script = WITHOUT_NUMPY + PATTERNS + MODULES + COMMANDS
    # A warning of torch 2.11.
    command = [sys.executable, "-W", "ignore:Sparse invariant checks:UserWarning", "-c", script]
    found = subprocess.run(command, capture_output=True, text=True)
    assert (found.returncode, found.stderr) == (0, "")


def test_the_command_says_nothing_of_numpy_and_programs_do(tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text("raise ModuleNotFoundError('none here', name='numpy')")
    script = tmp_path / "bin" / "ringtile"
    script.parent.mkdir()
    script.write_text("from ringtile.cli import main\nraise SystemExit(main())")
    paths = os.pathsep.join([str(tmp_path), str(Path(ringtile.__file__).parents[1])])
    for command, is_silent in (
        ([str(script), "show", "causal", "--tokens", "64"], True),
        (["-c", "import ringtile", "ringtile"], False),
    ):
        environment = {**os.environ, "PYTHONPATH": paths}
        found = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment)
        assert found.returncode == 0
        assert ("Failed to initialize NumPy" not in found.stderr) == is_silent
        assert found.stderr == "" or not is_silent


def test_a_digest_of_contents_is_that_of_the_values() -> None:
    x = torch.arange(24).view(4, 6)
    assert digest_of(x) == digest_of(x.clone()) == digest_of(x.mT.contiguous().mT)
    assert digest_of(x[:, 1:]) == digest_of(x[:, 1:].clone())
    changed = x.clone()
    changed[-1, -1] += 1
    others = (changed, x.view(6, 4), x.int(), x[:3], x[:0], x[:0].flatten(), x.mT, torch.zeros(()), torch.ones(()))
    digests = [digest_of(other) for other in (x, *others)]
    assert len(set(digests)) == len(digests)
