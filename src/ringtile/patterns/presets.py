"""Compositions from papers."""

from collections.abc import Sequence
from functools import reduce
from operator import or_

from ringtile.patterns.base import Pattern
from ringtile.patterns.blocks import SampledBlocks
from ringtile.patterns.checks import checked_int, checked_ints
from ringtile.patterns.local import Causal, GlobalTokens, Segments, Window
from ringtile.patterns.random import RandomBlocks


def longformer(window: int = 512, global_tokens: int = 64) -> Pattern:
    """Return a window of ``window`` tokens per side with global tokens (Beltagy et al. 2020, arXiv:2004.05150).

    The paper counts both sides together. Its window of 512 is ``window=256`` here.

    >>> longformer()
    window(512) | global_tokens(64)
    """
    return Window(window) | GlobalTokens(global_tokens)


def bigbird(random: int = 3, window: int = 96, global_tokens: int = 128, block: int = 64) -> Pattern:
    """Return a window, global tokens and ``random`` blocks of ``block`` tokens (Zaheer et al. 2020, arXiv:2007.14062).

    The defaults are from the paper: blocks of 64 tokens, with three random blocks, three in the window (96 tokens per
    side) and two global ones.

    >>> bigbird()
    window(96) | global_tokens(128) | random_blocks(3, block=64)
    """
    return Window(window) | GlobalTokens(global_tokens) | RandomBlocks(random, block=block)


def longnet_union(
    segment_lengths: Sequence[int] = (2048, 4096, 8192, 16384, 32768), dilation_rates: Sequence[int] = (1, 2, 4, 6, 12)
) -> Pattern:
    """Return the union of LongNet's branches, one per (segment length, rate) (Ding et al. 2023, arXiv:2307.02486).

    Raises ValueError if the two sequences differ in length.

    >>> longnet_union([2048, 4096], [1, 2])
    segments(2048) | segments(4096, 2)
    """
    segment_lengths = checked_ints("longnet_union", "segment_lengths", segment_lengths, 1)
    dilation_rates = checked_ints("longnet_union", "dilation_rates", dilation_rates, 1)
    if len(segment_lengths) != len(dilation_rates):
        raise ValueError(
            f"longnet_union expects as many dilation_rates as segment_lengths, got dilation_rates={dilation_rates} "
            f"for segment_lengths={segment_lengths}"
        )
    branches = zip(segment_lengths, dilation_rates, strict=True)
    return reduce(or_, [Segments(length, rate) for length, rate in branches])


def streaming(sinks: int = 4, window: int = 1024) -> Pattern:
    """Return causal attention to the first and the last tokens (StreamingLLM, Xiao et al. 2023, arXiv:2309.17453).

    >>> streaming()
    causal & (window(1024) | global_tokens(4))
    """
    return Causal() & (Window(window) | GlobalTokens(sinks))


def hierarchical(
    local: int = 4096,
    node: int = 32768,
    local_density: float = 0.5,
    node_density: float = 0.2,
    inter_node_density: float = 0.05,
    block: int = 128,
) -> Pattern:
    """Return a pattern with a density for the pairs inside ``local`` tokens, inside ``node`` tokens, and beyond.

    It is one pattern with one softmax, a function of positions and of these two lengths. They belong to the model: with
    another number of ranks it computes the same. If a rank holds ``local`` tokens and a node ``node``, the last two
    densities are also the fractions of keys that travel inside and between nodes, because all queries of a segment
    share the keys that they keep of other segments. A query always keeps its own block of ``block`` tokens.

    Densities are exact for all pairs, to the percent, if ``local`` is a multiple of ``block`` times the denominators of
    the densities, twice that of ``local_density``. Otherwise each row of blocks is off by at most a block per level and
    side. Under `Causal` the half squares on the diagonal keep more, by half a block per row. Raises ValueError if
    ``local`` is no multiple of ``block``, ``node`` is no multiple of ``local``, or a density is not in ``[0, 1]``.

    >>> hierarchical(4096, 32768)
    segments(128) | sampled_blocks(2, 4, 128, 4096) | sampled_blocks(1, 5, 4096, 32768) | sampled_blocks(1, 20, 32768)
    """
    # It brings `decimal`, which `import torch` does not load.
    from fractions import Fraction

    block = checked_int("hierarchical", "block", block, 1)
    local = checked_int("hierarchical", "local", local, 1)
    node = checked_int("hierarchical", "node", node, 1)
    if local % block:
        raise ValueError(f"hierarchical expects a multiple of block={block}, got local={local}")
    if node % local:
        raise ValueError(f"hierarchical expects a multiple of local={local}, got node={node}")
    levels: list[Pattern] = [Segments(block)]
    for name, density, segment, within in (
        ("local_density", local_density, block, local),
        ("node_density", node_density, local, node),
        ("inter_node_density", inter_node_density, node, 0),
    ):
        if not 0 <= density <= 1:
            raise ValueError(f"hierarchical expects 0 <= {name} <= 1, got {name}={density!r}")
        part = Fraction(density).limit_denominator(100)
        # Pairs of blocks, so that a query also keeps the block before its own.
        times = 2 if segment == block and part.numerator == 1 < part.denominator else 1
        if part:
            levels.append(SampledBlocks(part.numerator * times, part.denominator * times, segment, within, block))
    return reduce(or_, levels)
