"""FlexAttention's ``score_mod`` as options of `sparse_attention`: read from the operations that it is made of."""

import math
from collections.abc import Callable
from enum import Enum, auto
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from ringtile.functional.bias import Relative
from ringtile.patterns.private import call, tree_leaves


class _Kind(Enum):
    """What a value of a ``score_mod`` follows from."""

    FREE = auto()
    """The head and the distance alone."""
    QUERY = auto()
    """The position of the query, and a constant added to it."""
    KEY = auto()
    SCORE = auto()
    """The score, and a free number added to it."""
    BATCH = auto()


_ORDERS = {"ge", "gt", "le", "lt", "eq", "ne"}
_LARGEST = 1 << 20
"""Largest number that is added to a position in floating point."""
_EXACT = {torch.int32, torch.int64, torch.float32, torch.float64}


def from_score_mod(
    score_mod: Callable[..., Tensor], num_heads: int, n_queries: int, n_keys: int, *, device: Any = None
) -> dict[str, Any]:
    """Return the options of `sparse_attention` for a FlexAttention ``score_mod(score, b, h, q_idx, kv_idx)``.

    It reads the operations of the function. A number added to the score that follows from the head and the distance
    ``q_idx - kv_idx``, as ALiBi's and T5's do, is a `Relative` with all ``Nq + Nk - 1`` distances. Tensors that the
    function reads get their gradients. ``c * tanh(score / c)`` is the softcap c. In FlexAttention both positions count
    from 0, hence ``start=0``.

    Args:
        score_mod: The function.
        num_heads: H of the queries.
        n_queries: Nq of the call.
        n_keys: Nk of the call.
        device: That of the call. Default: the default device.

    Raises:
        ValueError: If the function is no such sum, as one that masks, that follows from the batch or from one position
            alone. Masks belong into the pattern, see `Elements.from_mask_mod`.

    Example:
        >>> from ringtile import sparse_attention
        >>> from ringtile.patterns import Causal
        >>> q, k, v = torch.randn(3, 1, 4, 100, 16).unbind()
        >>> options = from_score_mod(lambda score, b, h, i, j: score - 0.1 * (h + 1) * (i - j).abs(), 4, 100, 100)
        >>> out = sparse_attention(q, k, v, Causal(), **options)
        >>> from_score_mod(lambda score, b, h, i, j: 20 * torch.tanh(score / 20), 4, 100, 100)
        {'softcap': 20.0}
    """
    if not callable(score_mod):
        raise ValueError(f"score_mod: expected a function, got {score_mod!r}")
    # Of one element, because an index without dimensions becomes a number.
    zeros = [torch.zeros(1, dtype=dtype, device=device) for dtype in (torch.float32, *[torch.int64] * 4)]
    try:
        with torch.no_grad():
            # It takes longer to import than all of ringtile.
            trace: Any = call("torch.fx.experimental.proxy_tensor:make_fx", "score_mod", FunctionType, score_mod)
            traced = trace(*zeros)
    except RuntimeError as error:
        raise ValueError(f"score_mod: expected operations that do not depend on values, got {error}") from None
    if (softcap := _softcap_of(traced)) is not None:
        return {"softcap": softcap}
    _check(traced)
    distance = torch.arange(1 - n_queries, n_keys, device=device)
    head = torch.arange(num_heads, device=device).unsqueeze(1)
    score = torch.zeros(num_heads, len(distance), dtype=torch.float32, device=device)
    try:
        table = score_mod(score, zeros[1], head, (-distance).clamp(min=0), distance.clamp(min=0))
    except (IndexError, RuntimeError) as error:
        raise ValueError(f"score_mod: expected tensors with a number for each head and distance, got {error}") from None
    if table.shape != score.shape or not table.isfinite().all():
        raise ValueError(
            f"score_mod: expected a finite number for each head and distance, got {table.shape=}; a mask belongs into "
            "the pattern"
        )
    return {"bias": Relative(table, n_queries - 1), "start": 0}


def _check(traced: GraphModule) -> None:
    """Raise ValueError unless a function adds a number to the score that follows from the head and the distance."""
    kinds: dict[Any, _Kind] = {}
    given = iter((_Kind.SCORE, _Kind.BATCH, _Kind.FREE, _Kind.QUERY, _Kind.KEY))
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            kinds[node] = next(given)
        elif node.op == "get_attr":
            kinds[node] = _Kind.FREE
        elif node.op == "call_function":
            # An operand that comes twice counts twice.
            found = _kind(node, [kinds[each] for each in tree_leaves(node.args) if isinstance(each, Node)])
            if found is None:
                raise ValueError(
                    "score_mod: expected the score plus a number of the head and the distance q_idx - kv_idx, or a "
                    f"softcap, got {node.format_node()}"
                )
            kinds[node] = found
        elif kinds.get(node.args[0]) is not _Kind.SCORE:
            raise ValueError("score_mod: expected a result with the score in it")


def _name(operator: Any) -> str:
    """Return the name of an operator, "add" for aten::add.Tensor."""
    name: str = operator.name()
    return name.partition("::")[2].partition(".")[0]


def _kind(node: Node, of: list[_Kind]) -> _Kind | None:
    """Return what the result of an operation follows from, or None for anything else."""
    target: Any = node.target
    name, known = _name(target), set(of)
    if not known:
        return _Kind.FREE if name == "scalar_tensor" else None
    if known == {_Kind.FREE}:
        if name == "index":
            # Of a tensor of yours. Another would have other elements for many distances.
            return _Kind.FREE if isinstance(node.args[0], Node) and node.args[0].op == "get_attr" else None
        elementwise = torch.Tag.pointwise in target.tags or name in ("_to_copy", "lift_fresh_copy", "detach")
        return _Kind.FREE if elementwise else None
    if name == "_to_copy":
        return of[0] if node.kwargs.get("dtype") in _EXACT else None
    if node.kwargs or name not in {"add", "sub", *_ORDERS}:
        return None
    if known == {_Kind.QUERY, _Kind.KEY}:
        return _Kind.FREE if name != "add" else None
    moved = known - {_Kind.FREE}
    # The number can be subtracted, and not what it moves.
    first = of[0] in moved and isinstance(node.args[0], Node)
    if name in _ORDERS or len(moved) != 1 or of.count(*moved) != 1:
        return None
    if moved != {_Kind.SCORE} and node.meta["val"].is_floating_point():
        # A position plus a number rounds, unless it is a whole or a half.
        numbers = [x for x in node.args if isinstance(x, int | float)]
        if not numbers or not (numbers[0] * 2.0).is_integer() or abs(numbers[0]) > _LARGEST:
            return None
    return moved.pop() if name == "add" or first else None


def _softcap_of(traced: GraphModule) -> float | None:
    """Return c if a function is ``c * tanh(score / c)``."""
    names, numbers = [], []
    score, *_, last = traced.graph.nodes
    at = score
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            continue
        if node.op == "call_function" and node.all_input_nodes == [at]:
            names.append(_name(node.target))
            numbers += [x for x in node.args if isinstance(x, int | float)]
            at = node
    if last.args[0] is not at or len(numbers) != 2 or numbers[1] <= 0:
        return None
    inner = {"div": numbers[0], "mul": 1 / numbers[0] if numbers[0] else math.inf}.get(names[0])
    fits = names[1:] == ["tanh", "mul"] and inner is not None and math.isclose(inner, numbers[1], rel_tol=1e-7)
    return float(numbers[1]) if fits else None
