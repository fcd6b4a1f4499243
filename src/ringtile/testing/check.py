"""Judge attention functions against float64, by the error that PyTorch makes in the same dtype."""

import inspect
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from itertools import islice, product

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ringtile.patterns import Dense, from_mask
from ringtile.testing import oracle
from ringtile.testing.cases import SHAPES, Case, Shape, draw

Attention = Callable[..., Tensor]

REFUSALS = (RuntimeError, ValueError)
FAILURES = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError)
RESULTS = ("output", "gradient of query", "gradient of key", "gradient of value")


@dataclass(frozen=True)
class Failure:
    """A wrong result, its relative error in the L2 norm, and the largest error that is right.

    ``cases`` counts the cases with this rule and wrong result. ``case`` is the smallest.
    """

    name: str
    case: Case
    result: str
    error: float
    bound: float
    cases: int = 1

    def __str__(self) -> str:
        words = self.result
        if self.bound:
            off = f"is off by {self.error:.2g}, more than {self.bound:.2g}"
            words += f" {off if math.isfinite(self.error) else 'has NaN or infinity'}"
        line = f"import torch; from ringtile.testing import *; check_case({self.name}, {self.case})"
        return f"WRONG {self.case.rule} (cases: {self.cases}): {words}\n    {line}"


@dataclass(frozen=True)
class Report:
    """The number of checked cases, the failures, the refused cases by error, unchecked words."""

    name: str
    checked: int
    failures: list[Failure]
    refusals: dict[str, list[Case]]
    unchecked: list[str]

    def __str__(self) -> str:
        refused = sum(map(len, self.refusals.values()))
        lines = [f"{self.name}: {self.checked} cases checked, {refused} refused"]
        lines += map(str, self.failures)
        for error, cases in self.refusals.items():
            lines.append(f"REFUSED (cases: {len(cases)}): {error}\n    {cases[0]}")
        if self.unchecked:
            lines.append(f"NOT CHECKED: {', '.join(self.unchecked)}")
        return "\n".join(lines)


def check_attention(
    attention: Attention,
    rules: str = "all causal window documents padding random scale large empty nan",
    *,
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16, torch.float16),
    gradients: bool = True,
    device: str = "cpu",
    seed: int = 0,
    cases: int | None = None,
    raises: bool = True,
) -> Report:
    """Check a function at boundary shapes, and raise AssertionError with a report if it is wrong.

    ``attention(query, key, value, ...)`` gets tensors ``[B, H, N, D]``, and the rule by its own
    parameter: ``is_causal`` or ``attn_mask`` (`F.scaled_dot_product_attention`), ``block_mask``
    (FlexAttention) or ``pattern`` (`sparse_attention`). ``is_causal`` counts from the first key.

    The words in ``rules``: ``all``, ``causal``, ``window``, packed ``documents``, ``padding``,
    ``random`` pairs, a ``scale``, ``large`` scores beyond float16, ``empty`` rows, whose output is
    0, and ``nan`` in keys that no query reads. ``cases`` cuts the list. ``raises=False`` returns
    the report in any case.

    The relative error may be 3 times the error of PyTorch's math attention on the same numbers, or
    one rounding. If the function raises ValueError or RuntimeError, it refuses the case. A rule or
    dtype with refused cases only is wrong. Raises ValueError for unknown words and parameters.

        >>> import torch.nn.functional as F
        >>> print(check_attention(F.scaled_dot_product_attention, "causal window", cases=12))
        scaled_dot_product_attention: 12 cases checked, 0 refused
    """
    options, shapes = _options(attention), list(SHAPES.values())
    judge = partial(_failure, attention, options)
    if "enable_gqa" not in options:
        shapes = [replace(shape, key_heads=shape.heads) for shape in shapes]
    first, words = Case(seed=seed, gradients=gradients, device=device), rules.split() or [""]
    settings = [replace(first, rule=word, dtype=dtype) for word, dtype in product(words, dtypes)]
    # The first cases have all rules and dtypes, and the shapes in turn.
    turns = product(range(len(shapes)), enumerate(settings))
    every = (replace(x, shape=shapes[(turn + n) % len(shapes)]) for turn, (n, x) in turns)
    checked: list[Case] = []
    wrong: dict[tuple[str, str], list[Failure]] = {}
    refusals: dict[str, list[Case]] = {}
    for case in islice((x for x in every if x.shape.keys or x.rule == "empty"), cases):
        try:
            failure = judge(case)
        except REFUSALS as error:
            line = f"{type(error).__name__}: {error}".partition("\n")[0]
            refusals.setdefault(re.sub(r"\d+", "N", line), []).append(case)
            continue
        checked.append(case)
        if failure:
            wrong.setdefault((case.rule, failure.result), []).append(failure)
    failures = [replace(_smallest(judge, alike[0]), cases=len(alike)) for alike in wrong.values()]
    seen = {word for case in checked for word in (case.rule, case.dtype)}
    unchecked = [str(word) for word in (*words, *dtypes) if word not in seen]
    report = Report(_name(attention), len(checked), failures, refusals, unchecked)
    if raises and (failures or unchecked):
        raise AssertionError(str(report))
    return report


def check_case(attention: Attention, case: Case) -> None:
    """Check one case, as a line in a report does. Raises AssertionError if it is wrong."""
    if failure := _failure(attention, _options(attention), case):
        raise AssertionError(str(failure))


def _name(attention: Attention) -> str:
    name = getattr(attention, "__name__", "")
    return name if name.isidentifier() else "attention"


def _options(attention: Attention) -> set[str]:
    """Return the names of the parameters."""
    options = {"attn_mask", "is_causal", "scale", "enable_gqa"}
    if not inspect.isbuiltin(attention):
        options = set(inspect.signature(attention).parameters)
    known = {"pattern", "block_mask", "attn_mask", "is_causal"}
    if not options & known:
        raise ValueError(f"attention: expected a parameter of {known}, got {options}")
    return options


def _failure(attention: Attention, options: set[str], case: Case) -> Failure | None:
    """Return the first wrong result."""
    takes_flag = "is_causal" in options and "pattern" not in options
    is_flag = takes_flag and case.rule == "causal" and not case.shape.start
    start = 0 if is_flag else case.shape.first
    tensors, output_grad, rule, pairs = draw(case, start)
    pairs, grad = pairs.to(case.device), output_grad if case.gradients else None
    inputs = [x.to(case.device) for x in tensors]
    function = _prepared(attention, options, case, rule, pairs, is_flag)

    def outputs(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out, size = function(query, key, value), output_grad.shape
        if (out.shape, out.dtype) != (size, case.dtype):
            raise TypeError(f"expected {case.dtype} {size}, got {out.dtype} {out.shape}")
        return out

    failure = partial(Failure, _name(attention), case)
    try:
        results = _results(outputs, inputs, grad)
    except FAILURES as raised:
        return failure(f"call raises {type(raised).__name__}: {raised}", math.inf, 0.0)
    exact = partial(oracle.attention, rule=rule, start=start, scale=case.scale)
    right = _results(lambda *x: exact(*x)[0], [x.double() for x in tensors], grad)
    # PyTorch has no kernel for sizes of 0.
    theirs = right
    if pairs.numel():
        clean = [x.nan_to_num() for x in inputs]
        dense = partial(F.scaled_dot_product_attention, attn_mask=pairs, enable_gqa=True)
        with sdpa_kernel(SDPBackend.MATH):
            theirs = _results(partial(dense, scale=case.scale), clean, grad)
    # A result is rounded once, and its scores in float32.
    eps = torch.finfo(case.dtype).eps
    least = eps + 4 * min(eps, torch.finfo(torch.float32).eps) * case.amplitude**2
    units = (1.0, case.amplitude, case.amplitude, 1.0)
    # An infinite error of PyTorch's would let every result pass.
    errors = [x if math.isfinite(x) else 0.0 for x in map(_error, theirs, right, units)]
    bounds = [max(least, 3 * x) for x in errors]
    errors = list(map(_error, results, right, units))
    for result, error, bound in zip(RESULTS, errors, bounds, strict=False):
        if error > bound:
            return failure(result, error, bound)
    half = case.shape.queries // 2
    cut = start + half
    if half and 0 < cut < case.shape.keys and not pairs[:, :, :half, cut:].any():
        later = torch.arange(case.shape.keys, device=case.device)[:, None] >= cut
        key, value = (torch.where(later, 64 * x, x) for x in inputs[1:])
        out = outputs(inputs[0], key, value)
        error = _error(out[:, :, :half], right[0][:, :, :half], 1.0)
        if error > bounds[0]:
            return failure("output, if later keys change,", error, bounds[0])
    return None


def _prepared(
    attention: Attention,
    options: set[str],
    case: Case,
    rule: oracle.Rule,
    pairs: Tensor,
    is_flag: bool,
) -> Attention:
    """Return the function with a rule. Raises NotImplementedError if it lacks a parameter."""
    function = partial(attention)
    if case.shape.heads != case.shape.key_heads:
        function = partial(function, enable_gqa=True)
    if case.rule == "scale":
        function = partial(function, scale=case.scale)
    if "pattern" in options:
        if isinstance(rule, Tensor):
            rule = from_mask(pairs)
        elif case.shape.start is not None:
            function = partial(function, start=case.shape.start)
        function = partial(function, pattern=rule)
    elif is_flag:
        function = partial(function, is_causal=True)
    elif "block_mask" in options and pairs.numel() and not isinstance(rule, Dense):
        function = partial(function, block_mask=_block_mask(pairs))
    elif "block_mask" not in options and not isinstance(rule, Dense):
        mask = rule.to(case.device) if isinstance(rule, Tensor) else pairs[:1, :1]
        function = partial(function, attn_mask=mask)
    if missing := function.keywords.keys() - options:
        raise NotImplementedError(f"no parameter {', '.join(missing)}")
    return function


def _results(compute: Attention, inputs: Sequence[Tensor], grad: Tensor | None) -> list[Tensor]:
    """Return the output, and the inputs' gradients if it has one."""
    leaves = [x.detach().requires_grad_(grad is not None) for x in inputs]
    out = compute(*leaves)
    if grad is None:
        return [out]
    if not out.requires_grad:
        return [out, *map(torch.zeros_like, leaves)]
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(out), materialize_grads=True)]


def _error(result: Tensor, right: Tensor, unit: float) -> float:
    """Return the relative error. Terms have the size ``unit``, and their sum can cancel."""
    if not result.isfinite().all():
        return math.inf
    size = max(float(right.norm()), 0.3 * unit * math.sqrt(max(right.numel(), 1)))
    return float((result.double().cpu() - right).norm()) / size


def _block_mask(pairs: Tensor) -> object:
    from torch.nn.attention.flex_attention import create_block_mask

    batch, heads, n, m = pairs.shape
    device = str(pairs.device)
    return create_block_mask(lambda b, h, i, j: pairs[b, h, i, j], batch, heads, n, m, device)


def _smallest(judge: Callable[[Case], Failure | None], failure: Failure) -> Failure:
    """Return the same wrong result in a smaller case."""
    shapes = _smaller(failure.case.shape)
    while shape := next(shapes, None):
        try:
            other = judge(replace(failure.case, shape=shape))
        except REFUSALS:
            continue
        if other and other.result == failure.result:
            failure, shapes = other, _smaller(shape)
    return failure


def _smaller(shape: Shape) -> Iterator[Shape]:
    """Yield shapes that are smaller in one or two dimensions, the smallest first."""
    sizes = astuple(shape)[:7]
    if (plain := Shape(*sizes)) != shape:
        yield plain
    for axes in ((0,), (1, 2), (1,), (2,), (3, 4), (3,), (4,), (5, 6), (5,), (6,)):
        step = min(sizes[axis] for axis in axes) - 1
        while step > 0:
            less = [size - step * (axis in axes) for axis, size in enumerate(sizes)]
            yield replace(Shape(*less), start=shape.start, memory=shape.memory)
            step //= 2
