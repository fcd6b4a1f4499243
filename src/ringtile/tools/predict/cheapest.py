"""The cheapest layout of ranks for the layers of a model, by the model of time in `cost`."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ringtile.distributed.layout import LAYOUTS, Layout
from ringtile.distributed.plan import TRANSPORTS, Transport
from ringtile.patterns import Pattern
from ringtile.patterns.grammar import as_rule
from ringtile.tools.predict.cost import Cost, estimate
from ringtile.tools.predict.hardware import HARDWARE, Hardware, Sizes
from ringtile.tools.predict.work import Tiles, survey


class ModelCost(NamedTuple):
    """A layout for all layers of a model, and a transport for each pattern."""

    layout: Layout
    transports: dict[Pattern, Transport]
    costs: dict[Pattern, Cost]
    """Cost of one layer of each pattern."""
    seconds: float
    """Predicted seconds of the forward and the backward pass of all layers, by the model of time."""


def cheapest_layout(
    pattern: Pattern | str | Mapping[Pattern | str, int],
    n_tokens: int,
    n_ranks: int,
    sizes: Sizes | None = None,
    hardware: Hardware = HARDWARE["h100"],
) -> Layout:
    """Return the layout with the least predicted time of both passes: contiguous, zigzag or striped.

    It weighs work, balance and bytes with the transport that `ring_attention` takes by default. The same arguments
    give the same layout, so ranks need not agree on it. For a model whose layers differ, pass the number of layers of
    each pattern. ``sizes`` are those of `Sizes` by default. Raises ValueError if no layout supports the patterns, with
    the reason.

    >>> from ringtile.patterns import Causal, Window
    >>> cheapest_layout(Causal() & Window(4096), 1 << 20, 8) == Layout.contiguous(1 << 20, 8)
    True
    >>> cheapest_layout({Causal() & Window(4096): 20, Causal(): 4}, 1 << 20, 8) == Layout.zigzag(1 << 20, 8)
    True
    """
    layers = pattern if isinstance(pattern, Mapping) else {pattern: 1}
    rules = {as_rule(rule): count for rule, count in layers.items()}
    return cheapest_for_model(rules, n_tokens, n_ranks, sizes, hardware, None).layout


def cheapest_for_model(
    layers: Mapping[Pattern, int],
    n_tokens: int,
    n_ranks: int,
    sizes: Sizes | None = None,
    hardware: Hardware = HARDWARE["h100"],
    transports: Sequence[Transport] | None = TRANSPORTS,
) -> ModelCost:
    """Return one layout for all layers of a model, and a transport for each pattern, with the least predicted time.

    ``layers`` has the number of layers of each pattern. Pass the result's ``transports`` to `ring_attend`. The choice
    is among ``transports``: leave out "ring" if you use dropout or compile, and "hierarchy" if you have no mesh of
    nodes. It is only considered if the ranks span nodes. None leaves the choice to `ring_attention`. Raises ValueError
    if a number of layers is not positive, or a pattern has no possible transport, with the reason.

    >>> from ringtile.patterns import Causal, Window
    >>> found = cheapest_for_model({Causal() & Window(1024): 20, Causal(): 4}, 1 << 18, 8)
    >>> found.layout == Layout.zigzag(1 << 18, 8)
    True
    >>> found.transports
    {causal & window(1024): 'exchange', causal: 'ring'}
    """
    if not layers or not all(type(count) is int and count > 0 for count in layers.values()):
        raise ValueError(f"layers: expected a positive number of layers of each pattern, got {dict(layers)}")
    heads = next((pattern.num_heads for pattern in layers if pattern.num_heads is not None), 32)
    # All layouts have the same tiles, and listing them takes most of the time.
    sizes, listed = sizes or Sizes(heads=heads), dict[Pattern, Tiles]()
    found, errors = list[ModelCost](), list[ValueError]()
    for make in LAYOUTS.values():
        try:
            found.append(cost_of_model(layers, make(n_tokens, n_ranks), sizes, hardware, transports, listed))
        except ValueError as error:
            errors.append(error)
    if not found:
        raise errors[0]
    return min(found, key=lambda cost: cost.seconds)


def cost_of_model(
    layers: Mapping[Pattern, int],
    layout: Layout,
    sizes: Sizes,
    hardware: Hardware,
    transports: Sequence[Transport] | None = TRANSPORTS,
    listed: dict[Pattern, Tiles] | None = None,
) -> ModelCost:
    """Return the cost of a model's layers in one layout, each pattern with its cheapest of these transports."""
    costs, listed = dict[Pattern, Cost](), {} if listed is None else listed
    for pattern in layers:
        if pattern not in listed:
            listed[pattern] = Tiles(pattern, layout.n_tokens, sizes)
        work = survey(pattern, layout, sizes, listed=listed[pattern])
        found, errors = list[Cost](), list[ValueError]()
        for transport in (work.automatic,) if transports is None else transports:
            # On one node, a hierarchy is an exchange with more steps.
            if transport == "hierarchy" and layout.n_ranks <= hardware.ranks_per_node:
                continue
            try:
                found.append(estimate(work, transport, hardware))
            except ValueError as error:
                errors.append(error)
        if not found:
            errors.append(ValueError(f"transports: expected one for {pattern!r}, got {list(transports or ())}"))
            raise errors[0]
        costs[pattern] = min(found, key=lambda cost: cost.seconds)
    chosen = {pattern: cost.transport for pattern, cost in costs.items()}
    return ModelCost(layout, chosen, costs, sum(count * costs[pattern].seconds for pattern, count in layers.items()))
