"""Programs for `torchrun`, run by the ranks of `run_processes`, whose processes start in milliseconds."""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
import tempfile
from pathlib import Path

import processes
import torch.distributed as dist
from processes import run_processes


def output_of(n_ranks: int, program: Path, *words: str) -> str:
    """Run a program on ranks as torchrun does, and return what rank 0 prints. All ranks must end well."""
    with tempfile.TemporaryDirectory() as folder:
        printed = Path(folder, "printed")
        ended = run_processes(n_ranks, _run, str(program), words, str(printed), timeout=120.0)
        assert ended.exit_codes == [0] * n_ranks, "\n".join(ended.texts)
        return printed.read_text()


def _run(rank: int, n_ranks: int, program: str, words: tuple[str, ...], printed: str) -> None:
    # The program makes a group of its own, over the store that these ranks have.
    dist.destroy_process_group()
    store = processes._joining[0]
    facts = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": n_ranks, "LOCAL_WORLD_SIZE": n_ranks}
    facts |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": True}
    os.environ |= {name: str(fact) for name, fact in facts.items()}
    os.environ["HF_HUB_OFFLINE"] = "1"
    sys.argv = [program, *words]
    sys.path.insert(0, str(Path(program).parent))
    with open(printed if rank == 0 else os.devnull, "w") as file, contextlib.redirect_stdout(file):
        runpy.run_path(program, run_name="__main__")
