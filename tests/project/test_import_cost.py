"""`import ringtile` costs what `import torch` costs: nothing heavy comes along."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

# One worker imports torch for all of these tests.
pytestmark = pytest.mark.xdist_group("import cost")

STATEMENTS = {
    "ringtile": "import ringtile",
    "command line": "import ringtile.cli",
    "one verb": "from ringtile import cli; cli.parse(['doctor'])",
    "plan": "import ringtile.distributed, ringtile.tools.predict.plan",
    "first call": "import ringtile, ringtile.patterns as p; x = torch.randn(1, 2, 300, 16, requires_grad=True); "
    "ringtile.sparse_attention(x, x, x, p.Causal() & p.bigbird(1), dropout_p=0.1).sum().backward()",
    "flop counter later": "import ringtile; from torch.utils.flop_counter import flop_registry; "
    "assert torch.ops.ringtile.backward in flop_registry",
    "flop counter before": "from torch.utils.flop_counter import flop_registry; import ringtile; "
    "assert torch.ops.ringtile.backward in flop_registry",
}

PROBE = """
import json, os, sys
import torch
before = set(sys.modules)
for statement in sys.argv[1:]:
    child = os.fork()
    if not child:
        exec(statement)
        print(json.dumps(sorted(set(sys.modules) - before)), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, statement
"""

HEAVY_PARTS_OF_TORCH = (
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.tensor",
    "torch.export",
    "torch.fx.experimental.symbolic_shapes",
    "torch.testing",
    "torch.utils.cpp_extension",
)


@pytest.fixture(scope="module")
def loaded() -> dict[str, list[str]]:
    """The modules that each statement loads beyond those of `import torch`, in a fork of a process that did that."""
    probe = subprocess.run([sys.executable, "-c", PROBE, *STATEMENTS.values()], capture_output=True, text=True)
    assert probe.returncode == 0, probe.stderr
    return dict(zip(STATEMENTS, map(json.loads, probe.stdout.splitlines()), strict=True))


def heavy(modules: list[str]) -> list[str]:
    """Those that are neither ringtile's, nor the standard library's, nor a light part of torch."""
    return [
        module
        for module in modules
        if (
            module.startswith(HEAVY_PARTS_OF_TORCH)
            or module.partition(".")[0] not in {"ringtile", "torch", *sys.stdlib_module_names}
        )
    ]


def test_import_ringtile_loads_nothing_heavy(loaded: dict[str, list[str]]) -> None:
    modules = loaded["ringtile"]
    assert "ringtile.functional" in modules
    assert not any(module.startswith(("ringtile.distributed", "ringtile.testing")) for module in modules)
    assert [module for module in modules if module.partition(".")[0] != "ringtile"] == []


@pytest.mark.parametrize(
    ("what", "module"),
    [
        ("command line", "ringtile.cli"),
        ("plan", "ringtile.distributed.attention"),
        ("first call", "ringtile.kernels.blockwise.forward"),
    ],
)
def test_a_command_a_plan_and_a_first_call_load_nothing_heavy(
    loaded: dict[str, list[str]], what: str, module: str
) -> None:
    assert module in loaded[what]
    assert heavy(loaded[what]) == []


def test_a_verb_loads_only_its_own_room(loaded: dict[str, list[str]]) -> None:
    assert "ringtile.tools.doctor" in loaded["one verb"]
    assert {"ringtile.tools.show", "ringtile.tools.bench", "matplotlib"}.isdisjoint(loaded["one verb"])


@pytest.mark.parametrize("when", ["before", "later"])
def test_the_flop_counter_knows_the_operators_whenever_it_is_imported(loaded: dict[str, list[str]], when: str) -> None:
    assert "torch.utils.flop_counter" in loaded[f"flop counter {when}"]
