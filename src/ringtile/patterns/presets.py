"""Compositions from papers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import or_

from ringtile.patterns.base import Pattern, checked_ints
from ringtile.patterns.dilated import Segments
from ringtile.patterns.local import Causal, GlobalTokens, Window
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
