"""Private names of PyTorch: each is in one file, which says what happens without it, and the installed torch has it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

PACKAGE = Path(__file__).parents[2] / "src" / "ringtile"

_BALANCERS = "torch.distributed.tensor.experimental._context_parallel._load_balancer:"
NAMES = {
    "patterns/private.py": [
        "torch:_C._functorch.is_legacy_batchedtensor",
        "torch:_C._are_functorch_transforms_active",
        "torch._functorch.pyfunctorch:temporarily_clear_interpreter_stack",
        "torch:_C._len_torch_dispatch_stack",
        "torch:_C._len_torch_function_stack",
        "torch.utils._python_dispatch:_disable_current_modes",
        "torch:_C._autograd._profiler_enabled",
        "torch.autograd.forward_ad:_current_level",
        "torch:Tensor._version",
        "torch:Tensor._is_zerotensor",
        "torch:_assert_async",
        "torch.utils._pytree:tree_leaves",
        "torch.utils._pytree:tree_map",
        "torch:_remove_batch_dim",
        "torch:_add_batch_dim",
        "torch:_C._dispatch_key_parse",
        "torch:_C.DispatchKeySet",
        "torch:_C._ExcludeDispatchKeyGuard",
    ],
    "patterns/traced.py": [
        "torch._C._dynamo:eval_frame",
        "torch._C._dynamo:eval_frame._FrameAction",
        "torch._C._dynamo:eval_frame._FrameExecStrategy",
        "torch._dynamo._trace_wrapped_higher_order_op:TransformGetItemToIndex",
    ],
    "kernels/cpu_flash.py": [
        "torch:ops.aten._scaled_dot_product_flash_attention_for_cpu",
        "torch:ops.aten._scaled_dot_product_flash_attention_for_cpu_backward",
    ],
    "kernels/dense.py": ["torch:cpu._is_amx_tile_supported", "torch:cpu._is_amx_fp16_supported"],
    "kernels/flash.py": ["torch:ops.aten._flash_attention_forward", "torch:ops.aten._flash_attention_backward"],
    "modules/multihead.py": ["torch.nn:MultiheadAttention._reset_parameters"],
    "distributed/process_groups.py": [
        "torch.distributed.distributed_c10d:_get_process_group_store",
        "torch.distributed:Work._get_op_type",
        "torch.distributed:ProcessGroup._get_backend",
        "torch._C._distributed_c10d:Backend.Options._timeout",
    ],
    "integrations/torch_shards.py": [
        _BALANCERS + "_LoadBalancer",
        _BALANCERS + "_create_default_load_balancer",
        _BALANCERS + "_LoadBalancer._generate_indices",
    ],
    "integrations/transformers/masks.py": ["torch:Tensor._make_subclass"],
    "integrations/transformers/registry.py": ["torch.nn:Module._forward_pre_hooks"],
    "functional/score_mod.py": ["torch.fx.experimental.proxy_tensor:make_fx"],
}
"""The private names that each file reads."""

READ_BY_TORCH = {
    ("patterns/traced.py", "_dynamo_marked_constant"): "torch._dynamo.variables.functions",
    ("patterns/traced.py", "_torchdynamo_disable"): "torch._dynamo.symbolic_convert",
    ("patterns/traced.py", "_torchdynamo_disable_msg"): "torch._dynamo.symbolic_convert",
    ("modules/multihead.py", "_qkv_same_embed_dim"): "torch.nn.modules.transformer",
}
"""The private names that each file sets, and the module of PyTorch that reads them."""

OF_OBJECTS = {
    name for kind in (Tensor, nn.Module(), nn.MultiheadAttention(1, 1), dist.ProcessGroup) for name in dir(kind)
}
OF_OBJECTS |= {name for kind in (dist.Work, DeviceMesh, type(torch.ops.aten.add.Tensor)) for name in dir(kind)}
OF_OBJECTS |= {"_schema"} | {re.split("[.:]", name)[-1] for names in NAMES.values() for name in names}
"""Names that objects of PyTorch have, whatever the variable is called."""


def is_private(name: str) -> bool:
    return bool(re.match(r"_[^_]", name))


def private_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and last part of each private name of PyTorch in a syntax tree: imported, by attribute, or in a string."""
    roots = {"torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None) or ""
            names = [f"{module}.{alias.name}".lstrip(".") for alias in node.names]
            if not getattr(node, "level", 0) and any(name.split(".")[0] == "torch" for name in names):
                roots |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
                for part in (part for name in names for part in name.split(".") if is_private(part)):
                    yield node.lineno, part
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            root = node.value
            while isinstance(root, ast.Attribute):
                root = root.value
            from_torch = isinstance(root, ast.Name) and root.id in roots
            if from_torch or (node.attr in OF_OBJECTS and node.attr not in own):
                yield node.lineno, node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
            if re.fullmatch(r"torch[\w.]*:[\w.]+", text) or text in OF_OBJECTS - own:
                yield from [(node.lineno, part) for part in re.split("[.:]", text) if is_private(part)][-1:]
        elif isinstance(node, ast.keyword) and node.arg and node.arg.startswith("_torch"):
            yield node.value.lineno, node.arg


def listed(file: str) -> set[str]:
    """The private names that a file may have, and the private modules and classes that they are in."""
    names = {part for name in NAMES.get(file, []) for part in re.split(r"[.:]", name)}
    return names | {name for place, name in READ_BY_TORCH if place == file}


def test_private_names_of_torch_are_in_one_file_each() -> None:
    seen: dict[str, set[str]] = {}
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        file = path.relative_to(PACKAGE).as_posix()
        for line, name in private_names(ast.parse(path.read_text(encoding="utf-8"))):
            seen.setdefault(name, set()).add(file)
            if name not in listed(file):
                wrong.append(f"{file}:{line} needs torch's {name}, which {__name__} does not list for it")
    wrong += [f"{name} is in {sorted(files)}" for name, files in seen.items() if is_private(name) and len(files) > 1]
    for file, names in NAMES.items():
        text = (PACKAGE / file).read_text(encoding="utf-8")
        wrong += [f"{file} no longer needs {name}" for name in names if re.split("[.:]", name)[-1] not in text]
    assert not wrong, "\n".join(wrong)


def has(name: str) -> bool:
    owner, _, last = name.rpartition("." if "." in name.partition(":")[2] else ":")
    try:
        kind = resolve_name(owner)
    except (ImportError, AttributeError):
        return False
    return hasattr(kind, last) or last in getattr(kind, "__annotations__", {})


def test_the_installed_torch_has_every_private_name() -> None:
    gone = [f"{file}: {name}" for file, names in NAMES.items() for name in names if not has(name)]
    for (file, name), module in READ_BY_TORCH.items():
        if name not in Path(resolve_name(module).__file__).read_text(encoding="utf-8"):
            gone.append(f"{file}: {name}, which {module} reads")
    assert not gone, f"torch {torch.__version__} has no longer:\n" + "\n".join(gone)


def test_a_name_that_has_changed_is_not_used() -> None:
    # The drill reads the names from this file, in a process without ringtile.
    from ringtile.patterns import private

    assert private.state("torch:compiler.is_compiling", True)() is False
    assert private.state("torch:compiler.is_compiling", 5)() == 5
    assert private.state("torch:compiler.no_such_name", 5)() == 5
    assert private.call("torch:numel", "tests", int, torch.zeros(3)) == 3
    for name, kind, arguments in (("numel", float, 1), ("numel", int, 2), ("no_such_name", int, 1)):
        line = rf"^torch {re.escape(torch.__version__)} has no torch\.{name} as ringtile needs it for tests; "
        with pytest.raises(NotImplementedError, match=line):
            private.call(f"torch:{name}", "tests", kind, *[torch.zeros(3)] * arguments)


def test_each_private_name_is_used_as_it_is() -> None:
    from ringtile.kernels.cpu_flash import flash_reason
    from ringtile.patterns import private

    names = {name: x for name, x in vars(private).items() if callable(x) and not name.startswith("_")}
    assert not [name for name, x in names.items() if getattr(x, "func", None) is private.refuse]
    fallbacks = [name for name, x in names.items() if getattr(x, "__name__", "") in ("<lambda>", "otherwise")]
    assert not fallbacks
    assert flash_reason() == ""


def test_without_private_names_results_are_right_or_refused() -> None:
    program = [sys.executable, str(PACKAGE.parents[1] / "scripts/drift_torch.py"), "--sample", "8"]
    result = subprocess.run(program, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "8 changes of torch" in result.stdout


def test_a_private_name_is_seen_however_it_is_written() -> None:
    source = """
import torch._dynamo
from torch import nn as layers
from torch._subclasses import FakeTensor
x._version, torch._C.anything, layers._private, self._own, "_is_zerotensor", private("torch:_C._some_name")
call._replace(a=1), __name__, getattr(x, "_ptr"), vars(f).update(_torchdynamo_disable=True)
"""
    names = "_C _dynamo _is_zerotensor _private _some_name _subclasses _torchdynamo_disable _version".split()
    assert sorted(name for _, name in private_names(ast.parse(source))) == names
