"""The clock of all commands and benchmarks: calls take turns, round after round.

    seconds_of(call, repeats, device)     mean seconds of a call
    interleaved(samples, rounds)          samples of several calls in turn, by name
    interleaved(samples, 3, seconds=1.0)  the same for at least 3 rounds and a second

A sample is what a function returns, so it can be seconds, or several times of one call. What a sample must not count,
such as a switch to another attention, is done in the function before it looks at the clock.
"""

import time
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

import torch

MAX_ROUNDS = 200
CPU = torch.device("cpu")

K = TypeVar("K", bound=Hashable)
S = TypeVar("S")


def seconds_of(call: Callable[[], object], repeats: int = 1, device: torch.device = CPU) -> float:
    """Return the mean seconds of a call."""
    # A GPU computes after the call has returned, so wait for it on both sides.
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    for _ in range(repeats):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - began) / repeats


def interleaved(
    samples: Mapping[K, Callable[[], S]],
    rounds: int,
    *,
    seconds: float = 0.0,
    most: int = MAX_ROUNDS,
    warm_up: bool = False,
    after_round: Callable[[], object] = lambda: None,
) -> dict[K, list[S]]:
    """Take one sample of each in turn, round after round, and return the samples by name.

    There are at least ``rounds`` rounds, and more for ``seconds``, up to ``most``. A round begins with the second of
    the round before, so that no call always comes after the same one, or after a pause. ``warm_up`` takes a round that
    does not count.

    >>> order = []
    >>> found = interleaved({name: lambda name=name: order.append(name) or len(order) for name in "abc"}, 2)
    >>> "".join(order), found["a"]
    ('abcbca', [1, 6])
    """
    names, done = list(samples), 0
    found: dict[K, list[S]] = {name: [] for name in names}
    if warm_up:
        for name in names:
            samples[name]()
    began = time.perf_counter()
    while names and (done < rounds or (done < most and time.perf_counter() - began < seconds)):
        first = done % len(names)
        for name in names[first:] + names[:first]:
            found[name].append(samples[name]())
        after_round()
        done += 1
    return found
