"""examples/train_elastic.py: a run that loses ranks continues as if it had never stopped."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from processes import run_processes

from ringtile.patterns import Window, parse

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import train_elastic

# One worker starts the processes that several tests read.
pytestmark = pytest.mark.xdist_group("elastic")

ROOT = Path(__file__).parents[2]


def options_of(folder: Path, layout: str, **more: object) -> argparse.Namespace:
    given = {"context": 700, "pattern": "window(150)", "steps": 8, "every": 4, "seed": 3, "fail_at": 0}
    return argparse.Namespace(folder=folder, layout=layout, dtype=torch.float64, **{**given, **more})


def train_and_write(rank: int, size: int, folder: Path, layout: str, seed: int) -> None:
    losses = train_elastic.train(options_of(folder, layout, seed=seed))
    if rank == 0:
        (folder / "losses").write_text(json.dumps(losses))
    dist.destroy_process_group()


def losses_of(n_ranks: int, folder: Path, layout: str, seed: int = 3) -> dict[int, float]:
    outcome = run_processes(n_ranks, train_and_write, folder, layout, seed, timeout=60)
    assert outcome.exit_codes == [0] * n_ranks, outcome.texts
    return {int(step): loss for step, loss in json.loads((folder / "losses").read_text()).items()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, float]]:
    """The checkpoint that 4 ranks saved after 4 steps, and the losses of their 8 steps."""
    folder = tmp_path_factory.mktemp("run")
    losses = losses_of(4, folder, "zigzag")
    shutil.rmtree(folder / "8")
    return folder, losses


@pytest.mark.parametrize(
    ("n_ranks", "layout"),
    [(2, "striped"), *(pytest.param(n_ranks, "contiguous", marks=pytest.mark.slow) for n_ranks in (1, 3))],
)
def test_other_ranks_continue_the_loss_curve(
    saved: tuple[Path, dict[int, float]], n_ranks: int, layout: str, tmp_path: Path
) -> None:
    folder, whole = saved
    shutil.copytree(folder / "4", tmp_path / "4")
    # The seed is that of the checkpoint.
    found = losses_of(n_ranks, tmp_path, layout, seed=17)
    assert list(found) == [5, 6, 7, 8]
    assert found == pytest.approx({step: whole[step] for step in found}, rel=1e-12, abs=0)
    assert found[8] < found[5]


@pytest.mark.filterwarnings("ignore:.*assuming the intent is to load in a single process:UserWarning")
def test_a_checkpoint_has_the_text_of_the_pattern_and_no_plan(saved: tuple[Path, dict[int, float]]) -> None:
    metadata = dcp.FileSystemReader(saved[0] / "4").read_metadata()
    assert {name.split(".")[0] for name in metadata.state_dict_metadata} == {"run", "weights", "moments"}
    facts = {"run": {"step": 0, "position": 0, "seed": 0, "pattern": ""}}
    dcp.load(facts, checkpoint_id=saved[0] / "4", no_dist=True)
    assert facts["run"] == {"step": 4, "position": 2800, "seed": 3, "pattern": "window(150)"}
    assert parse(str(facts["run"]["pattern"])) == Window(150)


def test_dropout_changes_with_the_step_and_the_layer() -> None:
    """Without it, the test of the loss curve would prove less."""
    x = torch.randn(1, 2, 256, 8)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    layout, run = train_elastic.Layout.contiguous(256, 1), {"seed": 3, "step": 1}
    first, other_layer, again = (
        train_elastic.attend(x, x, x, layout=layout, run=run, number=number) for number in (0, 1, 0)
    )
    later = train_elastic.attend(x, x, x, layout=layout, run={**run, "step": 2}, number=0)
    dist.destroy_process_group()
    assert torch.equal(first, again)
    assert (first - other_layer).abs().max() > 0.1
    assert (first - later).abs().max() > 0.1


WORDS = ["--context", "512", "--pattern", "window(64)", "--silence", "2"]
ENVIRONMENT = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def torchrun(*words: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", *words, str(ROOT / "examples" / "train_elastic.py")]


def curve(text: str) -> list[str]:
    return re.findall(r"^step (\d+) on (\d)", text, re.M)


@pytest.mark.slow
def test_torchrun_starts_the_ranks_again_and_the_log_names_the_lost_one(tmp_path: Path) -> None:
    command = torchrun("--standalone", "--nproc-per-node", "3", "--max-restarts", "1")
    command += [str(tmp_path), *WORDS, "--steps", "6", "--fail-at", "4"]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert [int(step) for step, _ in curve(done.stdout)] == [1, 2, 3, 3, 4, 5, 6]
    assert set(re.findall(r"^ringtile: (.*)$", done.stderr, re.M)) == {"rank 2 is lost: no heartbeat for 2 s"}
