"""Change one private name of the installed torch at a time: ringtile computes the same, or refuses in one line.

    python scripts/drift_torch.py               every change; writes benchmarks/records/drift-torch.json
    python scripts/drift_torch.py --only gone   the changes with "gone" in their text; writes no record
    python scripts/drift_torch.py --sample 8    that many, the same each time; writes no record

The names are those of tests/project/test_torch_names.py. Each is gone, takes one more argument, or returns something
else, in a forked process that imports ringtile afterwards, and runs the small checks of the name. The judge is dense
attention in float64. torch itself keeps the names that ringtile looks up by text, because torch needs most of them.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.machinery
import inspect
import json
import logging
import math
import multiprocessing
import pkgutil
import platform
import random
import sys
import textwrap
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / part) for part in ("tests/project", "src", "compat")]
RECORD = ROOT / "benchmarks/records/drift-torch.json"
OURS = str(ROOT / "src/ringtile") + "/"
SECONDS = 120


class Wrong(Exception):
    """A result that differs."""


def drawn(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def tensors(n: int = 150) -> list[Tensor]:
    return drawn(*[(2, 2, n, 16)] * 4)


def dense(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~keep, -math.inf)
    return scores.softmax(-1) @ v


def band(n: int, width: int = 20) -> Tensor:
    ahead = torch.arange(n) - torch.arange(n)[:, None]
    return (ahead <= 0) & (ahead >= -width)


def equal(what: str, one: Any, two: Any, tolerance: float = 1e-10) -> None:
    ones, twos = ([x] if isinstance(x, Tensor) else list(x) for x in (one, two))
    for x, y in zip(ones, twos, strict=True):
        if x.shape != y.shape or not torch.allclose(x.double(), y.double(), atol=tolerance, rtol=tolerance):
            raise Wrong(f"{what}: off by {float((x.double() - y.double()).abs().max()):.3g}")


def both(attend: Callable[..., Tensor], keep: Tensor, what: str, dtype: torch.dtype = torch.float64) -> None:
    q, k, v, out_grad = tensors(len(keep))
    found = [x.to(dtype).requires_grad_() for x in (q, k, v)]
    expected = [x.requires_grad_() for x in (q, k, v)]
    tolerance = 1e-10 if dtype == torch.float64 else 2e-4
    out, ours = dense(*expected, keep), attend(*found)
    equal(what, ours, out, tolerance)
    grads = torch.autograd.grad(ours, found, out_grad.to(dtype))
    equal(f"{what}, gradients", grads, torch.autograd.grad(out, expected, out_grad), tolerance)


def attention() -> None:
    from ringtile import sparse_attention

    for _ in range(2):
        both(lambda *x: sparse_attention(*x, "causal & window(20)"), band(150), "attention")
    q, k, v, _ = tensors(40)
    for x in (q, k, v, torch.zeros_like(q)):
        equal("a call without gradients", sparse_attention(x, k, v), dense(x, k, v, torch.tensor(True)))


def pytorchs_kernels() -> None:
    from ringtile import sparse_attention

    for dtype in (torch.float64, torch.float32):
        both(lambda *x: sparse_attention(*x, "causal", backend="blockwise"), band(150, 150), "blockwise", dtype)
        both(lambda *x: sparse_attention(*x, "causal", backend=None), band(150, 150), "causal", dtype)
    both(lambda *x: sparse_attention(*x, "causal", backend="dense"), band(150, 150), "dense")


def transforms() -> None:
    from ringtile import sparse_attention

    q, k, v, tangent = tensors(40)
    keep = band(40)

    def ours(*x: Tensor) -> Tensor:
        return sparse_attention(*x, "causal & window(20)")

    stacks = [torch.stack([x, 2 * x, x.sin()]) for x in (q, k, v)]
    expected = torch.stack([dense(*x, keep) for x in zip(*stacks, strict=True)])
    equal("vmap", torch.vmap(ours)(*stacks), expected)

    def loss(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *x: attend(*x).sin().sum()

    by = tuple(range(3))
    judge = loss(lambda *x: dense(*x, keep))
    equal("grad", torch.func.grad(loss(ours), by)(q, k, v), torch.func.grad(judge, by)(q, k, v))
    moved = torch.func.jvp(judge, (q, k, v), (tangent,) * 3)
    equal("jvp", torch.func.jvp(loss(ours), (q, k, v), (tangent,) * 3), moved)
    forward_ad = torch.autograd.forward_ad
    with forward_ad.dual_level():
        out = loss(ours)(*(forward_ad.make_dual(x, tangent) for x in (q, k, v)))
        equal("forward mode", list(forward_ad.unpack_dual(out)), moved)


def batched_gradients() -> None:
    from ringtile import sparse_attention

    q, k, v, _ = tensors(40)

    def grads(attend: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = attend(*leaves)
        cotangents = torch.linspace(-1, 1, 3 * out.numel(), dtype=out.dtype).view(3, *out.shape)
        return torch.autograd.grad(out, leaves, cotangents, is_grads_batched=True)

    found = grads(lambda *x: sparse_attention(*x, "causal & window(20)", backend="blockwise"))
    equal("is_grads_batched", found, grads(lambda *x: dense(*x, band(40))))


def indices() -> None:
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    from ringtile.index import build_index
    from ringtile.patterns import Causal, Elements, Window

    def index_of(width: int) -> Any:
        return build_index(Causal() & Window(width), 300, block=64)

    def in_vmap(x: Tensor) -> Tensor:
        index_of(33)
        return x + 1

    torch.vmap(in_vmap)(torch.zeros(3))
    with FakeTensorMode():
        index_of(34)
    make_fx(lambda x: in_vmap(x) if index_of(35) else x)(torch.zeros(3))
    make_fx(lambda x: x + 1 if index_of(36) else x, pre_dispatch=True)(torch.zeros(3))
    with torch.inference_mode():
        index_of(37)
    for width in range(33, 38):
        equal(f"index {width}", index_of(width).to_dense()[0, 0], band(300, width))
    ids = torch.arange(300) // 70
    rule = Elements.from_mask_mod(lambda b, h, i, j: (ids[i] == ids[j]) & (i >= j))
    documents = (ids[:, None] == ids) & band(300, 300)
    equal("mask_mod", build_index(rule, 300).to_dense()[0, 0], documents)


def compiled() -> None:
    import torch._dynamo

    from ringtile import sparse_attention
    from ringtile.index import build_index
    from ringtile.patterns import Causal, Elements

    q, k, v, _ = tensors(40)
    torch._dynamo.config.suppress_errors = False
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]

    def ours(*x: Tensor) -> Tensor:
        return sparse_attention(*x, "causal & window(20)") * 2

    expected = 2 * dense(q, k, v, band(40))
    for inputs in ((q, k, v), leaves):
        for fullgraph in (True, False):
            try:
                equal("a graph", torch.compile(ours, backend="eager", fullgraph=fullgraph)(*inputs), expected)
            except torch._dynamo.exc.Unsupported:
                # A function that Dynamo no longer takes for a constant breaks the graph.
                if not fullgraph:
                    raise

    def breaks(*x: Tensor) -> Tensor:
        index = build_index(Causal() & Elements(lambda h, i, j: (i - j) % 3 == 0), 40)
        return sparse_attention(*x, index) * 2

    keep = band(40, 40) & ((torch.arange(40) - torch.arange(40)[:, None]) % 3 == 0)
    equal("a graph that breaks", torch.compile(breaks, backend="eager")(q, k, v), 2 * dense(q, k, v, keep))


def watched() -> None:
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    from ringtile import sparse_attention

    q, k, v, _ = tensors(40)
    expected, seen = dense(q, k, v, band(40)), []

    class Dispatches(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    class Functions(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    def ours() -> Tensor:
        return sparse_attention(q, k, v, "causal & window(20)")

    for _ in range(2):
        with Dispatches():
            equal("a mode", ours(), expected)
        with Functions():
            equal("a function mode", ours(), expected)
        equal("no mode", ours(), expected)
    with torch.profiler.profile() as profile:
        equal("a profiler", ours(), expected)
    if not any("ringtile" in event.key for event in profile.key_averages()):
        raise Wrong("a profiler sees no ringtile")
    if not any("ringtile" in name for name in seen):
        raise Wrong("a mode sees no ringtile")
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(lambda x: sparse_attention(x, k, v, "causal & window(20)"), (q,), check_trace=False)
        equal("a trace", traced(2 * q), dense(2 * q, k, v, band(40)))


def changes_in_place() -> None:
    from ringtile import sparse_attention
    from ringtile.index import build_index
    from ringtile.index.restrict import restricted
    from ringtile.patterns import Causal, from_mask

    q, k, v, _ = tensors(150)
    mask = band(150, 30)
    for rows in (0, 40, 90):
        mask[:rows, 0] = True
        equal("a mask that changes", sparse_attention(q, k, v, from_mask(mask)), dense(q, k, v, mask))
    with torch.inference_mode():
        inner = band(150, 30)
        equal("a mask of inference", sparse_attention(q, k, v, from_mask(inner)), dense(q, k, v, inner))
    # A copy: that of the cache stays.
    index = restricted(build_index(Causal(), 300, block=64), torch.ones(1, 1, 5, 5, dtype=torch.bool))
    q, k, v, _ = tensors(300)
    for _ in range(2):
        equal("an index", sparse_attention(q, k, v, index), dense(q, k, v, band(300, 300)))
    # Row tile 1 reads tile 0 in place of tile 1, which it has as a partial tile.
    index.rows.full.zero_(), index.cols.full.zero_()
    with contextlib.suppress(ValueError):
        found = sparse_attention(q, k, v, index)
        if torch.allclose(found, dense(q, k, v, band(300, 300))):
            raise Wrong("an index that changed in place is not read again")


def checks() -> None:
    from ringtile import sparse_attention
    from ringtile.index import build_index, restrict
    from ringtile.index.restrict import restricted
    from ringtile.patterns import Causal

    # PyTorch's operations, in place of the library's function, which needs no private name.
    restrict.list_copier = None
    base, keep = build_index(Causal(), 300, block=64), torch.rand(1, 2, 5, 5) > 0.3
    keep |= torch.eye(5, dtype=torch.bool)
    q, k, v, _ = tensors(300)
    wide = keep.repeat_interleave(64, 2).repeat_interleave(64, 3)[:, :, :300, :300] & band(300, 300)
    for layout in (keep, keep.mT.contiguous().mT):
        found = sparse_attention(q, k, v, restricted(base, layout, 60), backend="blockwise")
        equal("tiles with a capacity", found, dense(q, k, v, wide))
    try:
        restricted(base, keep, 3)
    except RuntimeError as error:
        if isinstance(error, NotImplementedError):
            raise
    else:
        raise Wrong("too many tiles go unnoticed")
    zeros = torch._efficientzerotensor(q.shape, dtype=q.dtype)
    equal("zeros", sparse_attention(zeros, k, v), dense(0 * q, k, v, torch.tensor(True)))


def modules() -> None:
    from ringtile.modules import SparseMultiheadAttention, replace_attention

    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 2, 64, 0.0, batch_first=True, dtype=torch.float64).eval()
    x = drawn((2, 50, 32))[0]
    expected = layer(x, src_mask=~band(50)).detach()
    replace_attention(layer, pattern="causal & window(20)")
    with torch.no_grad():
        equal("a layer of PyTorch", layer(x), expected)
    SparseMultiheadAttention(32, 2, pattern="causal")


def functions_of_yours() -> None:
    from ringtile import sparse_attention
    from ringtile.functional.score_mod import from_score_mod

    q, k, v, _ = tensors(40)
    keep = band(40, 40)
    options = from_score_mod(lambda score, b, h, i, j: score - 0.1 * (h + 1) * (i - j).abs(), 2, 40, 40)
    distance = (torch.arange(40)[:, None] - torch.arange(40)).abs()
    slope = 0.1 * torch.arange(1, 3)[:, None, None]
    scores = (q @ k.mT / 4 - slope * distance).masked_fill(~keep, -math.inf)
    equal("score_mod", sparse_attention(q, k, v, "causal", **options), scores.softmax(-1) @ v, 1e-6)
    if from_score_mod(lambda score, b, h, i, j: 20 * torch.tanh(score / 20), 2, 40, 40) != {"softcap": 20.0}:
        raise Wrong("another softcap")


def ranks() -> None:
    import torch.distributed as dist

    from ringtile.distributed import Layout, ring_attention
    from ringtile.distributed.process_groups import is_point_to_point, store_of, timeout_of
    from ringtile.integrations.torch_shards import balancer_of, shards_of

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group: Any = dist.group.WORLD
    mesh = dist.init_device_mesh("cpu", (1,))
    layout = Layout.contiguous(40, 1)
    q, k, v, _ = tensors(40)
    equal("a ring", ring_attention(q, k, v, "causal", layout=layout), dense(q, k, v, band(40, 40)))
    if shards_of(40, mesh) != layout:
        raise Wrong("other shards")
    turned = Layout.striped(40, 2, unit=5)
    tokens = balancer_of(turned)._generate_indices()[0]
    equal("a balancer", tokens, torch.cat([turned.positions(rank) for rank in (0, 1)]))
    if timeout_of(group) not in (1800, 300):
        raise Wrong(f"a timeout of {timeout_of(group)} s, neither the group's nor the store's")
    store_of(group).set("key", "value")
    works = [dist.all_reduce(torch.ones(1), async_op=True), SimpleNamespace(_get_op_type=lambda: 12)]
    if [is_point_to_point(work) for work in works][1] is not True:
        raise Wrong("a send is no send")


def caches() -> None:
    from ringtile.integrations.transformers.attention import PAGES
    from ringtile.integrations.transformers.decode import RoomyLayer

    keys, values, _, _ = tensors(40)
    layer, pages = RoomyLayer(), []
    for begin, end in ((0, 30), (30, 31), (31, 40)):
        new = [x[:, :, begin:end] for x in (keys, values)]
        equal("a cache", layer.update(*new), [x[:, :, :end] for x in (keys, values)])
        pages.append(getattr(layer.keys, PAGES))
    if pages[1] is not pages[2]:
        raise Wrong("a cache forgets its pages")
    layer.update(*new)
    layer.keys[:, :, 3] += 1
    layer.update(*new)
    if getattr(layer.keys, PAGES) is pages[2]:
        raise Wrong("a cache keeps pages of keys that changed")


def models() -> None:
    from tiny import config_of

    from ringtile.integrations.transformers import register, use_ringtile

    def made() -> Any:
        torch.manual_seed(0)
        kind, config = config_of("Llama")
        return kind(config).eval().double()

    ids = torch.randint(2, 97, (2, 50), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    eager, model = made(), made()
    eager.set_attn_implementation("eager")
    with torch.no_grad():
        expected = eager(ids).logits
        for _ in range(2):
            equal("a model", use_ringtile(model)(ids).logits, expected, 1e-5)
        mask[:, -7:] = 0
        found = torch.compile(use_ringtile(made(), "causal & window(20)"), backend="eager")(ids, attention_mask=mask)
        equal("a compiled model", found.logits[:, :20], expected[:, :20], 1e-5)
        register()
        exported = made()
        exported.set_attn_implementation("ringtile")
        call = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
        program = torch.export.export(exported, (), call, strict=False).module()
        equal("an exported model", program(**call).logits, expected, 1e-5)


GONE, MORE, OTHER = "is gone", "takes one more argument", "returns a tuple"
NEEDS: dict[Callable[[], None], tuple[str, ...]] = {
    attention: ("_are_functorch_transforms_active", "_current_level", "_is_zerotensor"),
    pytorchs_kernels: ("flash_attention_for_cpu", "_is_amx"),
    transforms: ("functorch_transforms", "_current_level", "tree_map", "peek"),
    batched_gradients: ("_batch_dim", "is_legacy_batchedtensor", "_dispatch_key_parse", "DispatchKey", "tree_map"),
    indices: ("temporarily_clear", "_disable_current_modes", "TransformGetItem", "tree_leaves", "_dispatch_stack"),
    compiled: ("eval_frame", "_functorch_transforms", "_current_level", "dynamo_disable", "marked_constant"),
    watched: ("_function_stack", "_dispatch_stack", "_profiler_enabled"),
    changes_in_place: ("Tensor._version",),
    checks: ("_assert_async", "_is_zerotensor"),
    modules: ("_reset_parameters", "_qkv_same_embed_dim"),
    functions_of_yours: ("make_fx", "tree_leaves"),
    ranks: ("_get_process_group_store", "_get_op_type", "_get_backend", "_timeout", "_load_balancer"),
    caches: ("Tensor._version",),
    models: ("_make_subclass", "_assert_async"),
}
"""The checks, and parts of the names that each needs."""
NOT_CHANGED = ("_flash_attention_forward", "_flash_attention_backward", "_forward_pre_hooks")
"""Two need a GPU, and PyTorch calls no module without the third."""


class Change(NamedTuple):
    """A private name, and what happens to it."""

    name: str
    kind: str

    def __str__(self) -> str:
        return f"{self.name.replace(':', '.')} {self.kind}"


def every_change() -> list[Change]:
    from test_torch_names import NAMES, READ_BY_TORCH

    names = [name for file in NAMES for name in NAMES[file] if not name.endswith(NOT_CHANGED)]
    made = [Change(name, GONE) for name in names]
    for name in names:
        if name.endswith(("_current_level", "_version", "_timeout")):
            made.append(Change(name, OTHER))
        elif not name.endswith(
            ("eval_frame", "_FrameAction", "_FrameExecStrategy", "_LoadBalancer", "_reset_parameters")
        ):
            made += [Change(name, MORE), Change(name, OTHER)]
    return made + [Change(f"{module}:{name}", "has another name") for (_, name), module in READ_BY_TORCH.items()]


def changed(value: Any, kind: str) -> Any:
    """Return what a name stands for after a change. Raise AttributeError if it is gone."""
    if kind == GONE:
        raise AttributeError("gone")

    def one_more(needed: Any, *arguments: Any, another: Any, **named: Any) -> Any:
        return value(needed, *arguments, **named)

    return one_more if kind == MORE else lambda *arguments, **named: (value(*arguments, **named), None)


class Renaming(importlib.machinery.SourceFileLoader):
    """Loads a module of PyTorch in which a name is another."""

    name = ""

    def get_code(self, fullname: str) -> Any:
        source = self.get_data(self.path).decode()
        return self.source_to_code(source.replace(f'"{self.name}"', f'"{self.name}_now"').encode(), self.path)

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        spec = importlib.machinery.PathFinder.find_spec(name, path) if name.startswith("torch._dynamo.") else None
        if spec is not None and spec.origin and spec.origin.endswith(".py"):
            loader = Renaming(name, spec.origin)
            loader.name, spec.loader = self.name, loader
        return spec


def apply(change: Change) -> None:
    """Change a name of PyTorch in this process, as ringtile finds it."""
    name, kind = change
    last = name.replace(":", ".").rpartition(".")[2]
    owner_name = name[: -len(last)].rstrip(":.")
    if kind == "has another name" and last == "_qkv_same_embed_dim":
        for part in ("activation", "transformer"):
            module = importlib.import_module(f"torch.nn.modules.{part}")
            source = Path(str(module.__file__)).read_text(encoding="utf-8")
            exec(compile(source.replace(last, f"{last}_now"), str(module.__file__), "exec"), vars(module))
            for key in vars(module).get("__all__", ()):
                setattr(nn, key, vars(module)[key])
    elif kind == "has another name":
        finder = Renaming("", "")
        finder.name = last
        sys.meta_path.insert(0, finder)
    elif last in ("_current_level", "_version", "_timeout", "_get_backend", "_get_op_type") or ":ops.aten" in name:
        if last == "_current_level":
            from ringtile.patterns import private

            vars(private)["forward_ad"] = SimpleNamespace(
                **{} if kind == GONE else {last: (torch.autograd.forward_ad,)}
            )
            return
        owner: Any = pkgutil.resolve_name(owner_name if ":" in owner_name else owner_name.replace(".ops", ":ops"))
        if kind == GONE and ":ops.aten" in name:
            unknown = type(owner).__getattr__
            vars(owner).pop(last, None)

            def lookup(self: Any, key: str) -> Any:
                return changed(None, GONE) if key == last else unknown(self, key)

            type(owner).__getattr__ = lookup
        elif kind == GONE:
            setattr(owner, last, property(lambda self: changed(None, GONE)))
        elif last in ("_version", "_timeout"):
            before = getattr(owner, last)
            setattr(owner, last, (lambda self: 0) if last == "_version" else property(lambda x: (before, None)))
        else:
            setattr(owner, last, changed(getattr(owner, last), kind))
    elif last == "_generate_indices":
        base: Any = pkgutil.resolve_name(owner_name)
        for owner in (base, *base.__subclasses__()):
            function = vars(owner)[last]
            if kind == GONE:
                delattr(owner, last)
                setattr(owner, f"{last}_now", function)
            elif kind == MORE or owner is not base:
                new = (lambda self, needed, restore: None) if kind == MORE else changed(function, kind)
                setattr(owner, last, new)
        base.__abstractmethods__ = frozenset()
    elif last == "_reset_parameters":
        setattr(nn.MultiheadAttention, f"{last}_now", vars(nn.MultiheadAttention)[last])
        source = inspect.getsource(nn.MultiheadAttention.__init__).replace(last, f"{last}_now")
        made: dict[str, Any] = {}
        module = sys.modules[nn.MultiheadAttention.__module__]
        exec(textwrap.dedent(source).replace("super()", "super(MultiheadAttention, self)"), vars(module), made)
        setattr(nn.MultiheadAttention, "__init__", made["__init__"])  # noqa: B010
        delattr(nn.MultiheadAttention, last)
    elif "eval_frame." in name:
        from torch._C._dynamo import eval_frame

        before = eval_frame
        vars(pkgutil)["resolve_name"] = lambda text: (
            SimpleNamespace(**{k: getattr(before, k) for k in dir(before) if k != last})
            if text == "torch._C._dynamo:eval_frame"
            else find(text)
        )
    else:
        vars(pkgutil)["resolve_name"] = lambda text: changed(find(text), kind) if text == name else find(text)


find = pkgutil.resolve_name


def judge(change: Change, checks: list[Callable[[], None]]) -> dict[str, str]:
    """Run checks after a change: right, refused, silent or crash."""
    late = change.name.endswith("_current_level")
    if not late and change.kind != "is changed":
        apply(change)
    import ringtile

    assert ringtile
    if late:
        apply(change)
    outcome = {"outcome": "right"}
    for check in checks:
        try:
            check()
        except Wrong as error:
            return {"outcome": "silent", "check": check.__name__, "said": str(error)}
        except Exception as error:
            said = str(error).strip()
            last = traceback.extract_tb(error.__traceback__)[-1]
            # Either the line of `refuse` with this name, or the next of its kind, or an error of an argument.
            module = change.name.replace(":", ".").rpartition(".")[0].removesuffix("._LoadBalancer")
            told = f"torch {torch.__version__} has no {module}" in said or change.name.endswith("_qkv_same_embed_dim")
            named = told or isinstance(error, ValueError)
            one_line = named and "\n" not in said and last.filename.startswith(OURS)
            outcome = {"outcome": "refused" if one_line else "crash", "check": check.__name__}
            outcome |= {
                "said": f"{type(error).__name__}: {said}"[:400],
                "where": f"{last.filename.removeprefix(OURS)}:{last.lineno}",
            }
            if not one_line:
                return outcome
    return outcome


def checks_of(change: Change) -> list[Callable[[], None]]:
    if change.kind == "is changed":
        return list(NEEDS)
    return [check for check, parts in NEEDS.items() if any(part in change.name for part in parts)]


def forked(change: Change) -> dict[str, str]:
    """Judge a change in a forked process."""
    checks = checks_of(change)
    mine, theirs = multiprocessing.Pipe(duplex=False)

    def work() -> None:
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        theirs.send(judge(change, checks))

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    theirs.close()
    result = {"outcome": "crash", "said": f"no result in {SECONDS} s, or a dead process"}
    with contextlib.suppress(EOFError):
        if mine.poll(SECONDS):
            result = mine.recv()
    process.kill()
    process.join()
    return {"change": str(change), "checks": str(len(checks)), **result}


def main() -> int:
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", metavar="TEXT", default="", help="the changes with TEXT in their text")
    parser.add_argument("--sample", type=int, metavar="N", help="N changes, the same each time")
    args = parser.parse_args()
    torch.set_num_threads(1)
    changes = [change for change in every_change() if args.only in str(change)]
    if "ringtile" in sys.modules:
        raise SystemExit("expected a process without ringtile, which reads most names when it is imported")
    if args.sample:
        slow = compiled, indices, transforms, models
        changes = [change for change in changes if not set(checks_of(change)) & set(slow)]
        changes = random.Random(11).sample(changes, args.sample)
    results = []
    if not args.sample:
        changes.insert(0, Change("torch:nothing", "is changed"))
    for change in changes:
        results.append(forked(change))
        if results[-1]["outcome"] not in ("right", "refused"):
            print(json.dumps(results[-1]), flush=True)
        elif sys.stderr.isatty():
            print(f"\r\033[K{len(results)} of {len(changes)}", end="", file=sys.stderr, flush=True)
    if not args.sample and results.pop(0)["outcome"] != "right":
        print("torch as it is: expected right results", file=sys.stderr)
        return 1
    count = Counter(result["outcome"] for result in results)
    if not args.only and not args.sample:
        record = {
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "changes": len(results),
            "outcomes": dict(sorted(count.items())),
            "not right": [result for result in results if result["outcome"] != "right"],
        }
        RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"{len(results)} changes of torch {torch.__version__}: {dict(sorted(count.items()))}")
    return int(bool(count.keys() - {"right", "refused"}))


if __name__ == "__main__":
    raise SystemExit(main())
