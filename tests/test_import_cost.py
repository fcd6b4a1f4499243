"""`import ringtile` costs what `import torch` costs: nothing heavy comes along."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

PROBE = """
import json, sys
import torch
before = set(sys.modules)
{statement}
print(json.dumps(sorted(set(sys.modules) - before)))
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


def loaded_by(statement: str) -> list[str]:
    """The modules that a statement loads in a fresh process, beyond those of `import torch`."""
    probe = subprocess.run(
        [sys.executable, "-c", PROBE.format(statement=statement)], capture_output=True, text=True, check=True
    )
    return json.loads(probe.stdout)


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


def test_import_ringtile_loads_nothing_heavy() -> None:
    modules = loaded_by("import ringtile")
    assert "ringtile.functional" in modules
    assert not any(module.startswith("ringtile.distributed") for module in modules)
    assert [module for module in modules if module.partition(".")[0] != "ringtile"] == []


def test_the_command_line_loads_nothing_heavy_before_a_verb_is_chosen() -> None:
    modules = loaded_by("import ringtile.cli")
    assert "ringtile.cli" in modules
    assert heavy(modules) == []


def test_a_plan_loads_no_compiler() -> None:
    modules = loaded_by("import ringtile.distributed, ringtile.tools.predict.plan")
    assert "ringtile.distributed.attention" in modules
    assert heavy(modules) == []


def test_a_first_call_loads_nothing_heavy() -> None:
    modules = loaded_by(
        "import ringtile, ringtile.patterns as p; x = torch.randn(1, 2, 300, 16, requires_grad=True); "
        "ringtile.sparse_attention(x, x, x, p.Causal() & p.bigbird(1), dropout_p=0.1).sum().backward()"
    )
    assert "ringtile.kernels.blockwise.forward" in modules
    assert heavy(modules) == []


@pytest.mark.parametrize("module", ["torch._dynamo", "hypothesis"])
def test_a_heavy_import_is_seen(module: str) -> None:
    assert module in heavy(loaded_by(f"import {module}"))


def test_the_flop_counter_knows_the_operators_whenever_it_is_imported() -> None:
    statements = ["import ringtile", "from torch.utils.flop_counter import flop_registry"]
    for first, second in (statements, statements[::-1]):
        asked = f"{first}\n{second}\nimport torch\nassert torch.ops.ringtile.backward in flop_registry"
        assert "torch.utils.flop_counter" in loaded_by(asked)
