"""What every test runs under: fixed seeds, uninitialised memory that shows, few threads."""

from __future__ import annotations

import gc
import os
import random
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.configuration
import pytest
import torch
from torch import Tensor
from torch._dynamo import trace_rules

# Beside the caches of pytest, ruff and mypy, so that a run leaves nothing in the root.
hypothesis.configuration.set_hypothesis_home_dir(Path(__file__).parents[1] / ".venv/cache/hypothesis")
hypothesis.settings.register_profile("ringtile", deadline=None, derandomize=True, database=None)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=2000)
hypothesis.settings.register_profile(
    "unshrunk",
    hypothesis.settings.get_profile("ringtile"),
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
)
hypothesis.settings.load_profile(os.environ.get("RINGTILE_HYPOTHESIS", "ringtile"))


class _TorchRandom:
    """Lets hypothesis seed torch's generator before each example."""

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def getstate(self) -> Tensor:
        return torch.get_rng_state()

    def setstate(self, state: Tensor) -> None:
        torch.set_rng_state(state)


_torch_random = _TorchRandom()
hypothesis.register_random(_torch_random)

# A shell that starts a command in the background has it ignore Ctrl-C, which some tests raise.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The problems are small: on a shared machine a second thread would spend its time waiting for the first. Programs that
# tests start read the variable.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"
# Inductor's processes that compile for GPUs.
os.environ["TORCH_WARM_POOL"] = "0"


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    if pluginmanager.is_blocked("cacheprovider"):
        parser.addini("cache_dir", "unknown without its plugin, so -p no:cacheprovider would fail")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    grouped = [item for item in items if item.get_closest_marker("xdist_group")]
    if getattr(config.option, "loadgroup", False) and not all("@" in item.nodeid for item in grouped):
        # Each worker would start the processes of a group again. pytest-xdist 3.8 does so with pytest 9.2.
        raise pytest.UsageError(f"pytest {pytest.__version__} with this pytest-xdist does not keep groups of tests")
    if not torch.cuda.is_available():
        no_gpu = pytest.mark.skip(reason="no CUDA device on this machine")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(no_gpu)


_REFUSED = re.compile(
    "is written by hand|No module named 'transformers|module transformers has no attribute|for .*, got none$"
    "|cannot import name '.*' from 'transformers|computes with it|does not support an attention implementation through"
    "|Unrecognized model identifier"
)
_FAILS_THERE = {
    "test_beams_lookup_and_chunks[prompt_lookup_num_tokens]": "its lookup needs a token that ends",
    "test_every_change_of_earlier_keys_begins_anew": "its caches add to themselves",
    "test_a_model_computes_what_it_does_with_eager[T5Gemma-": "its eager attention fails",
    "test_generation_is_that_of_eager[T5Gemma-": "its eager attention fails",
    "test_a_model_whose_source_is_not_known_is_built": "it reads the source itself",
    "test_models_that_cannot_run_are_refused_before_their_first_call": "it has more parts by hand",
    "test_a_model_computes_what_it_does_with_eager[Parakeet": "its eager attention is NaN for padding",
    "test_copies_and_switches[Parakeet": "its eager attention is NaN for padding",
    "test_a_model_computes_what_it_does_with_eager[DeBERTa-v2": "its scale is rounded in a script",
    "test_a_model_is_one_graph[MPNet": "its buckets break a graph",
    "test_every_kind_of_model_is_checked_and_measured[": "it has more parts by hand",
    "test_a_model_without_a_class_has_the_first_that_fits[T5": "it has more parts by hand",
    "test_a_pattern_of_an_encoder_is_measured": "it has more parts by hand",
    "test_encoders_are_compared_and_then_timed": "it has more parts by hand",
    "test_an_encoder_with_wrong_outputs_is_not_timed": "it has more parts by hand",
    "test_the_whole_demo": "it has more parts by hand",
    "test_docstring_examples[ringtile.integrations.transformers.indexers": "it has no DeepSeek-V3.2",
    "test_docstring_examples[ringtile.integrations.transformers.serving": "its cache has another interface",
}
"""Tests that fail by what transformers itself does in the oldest version that ringtile supports."""


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Any:
    """Skip what an old transformers lacks, or what it writes by hand, for which ringtile raises."""
    try:
        return (yield)
    except Exception as error:
        transformers = sys.modules.get("transformers")
        if transformers is None or tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 23):
            raise
        reasons = [why for name, why in _FAILS_THERE.items() if pyfuncitem.name.startswith(name)]
        if not reasons and not _REFUSED.search(str(error)):
            raise
        pytest.skip(f"transformers {transformers.__version__}: {(reasons or [str(error)])[0]}")


@pytest.fixture(autouse=True, scope="module")
def _frozen() -> None:
    """Those that collect garbage, transformers in each batch among them, need not look at all that lives by now."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    random.seed(0)
    torch.manual_seed(0)


def _poison(dtype: torch.dtype) -> float | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).max


def _poisoned(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def make_poisoned(*args: Any, **kwargs: Any) -> Tensor:
        made = make(*args, **kwargs)
        # Only what ringtile asks for: torch's own tracing and compiling rely on an empty tensor being one call.
        if torch.compiler.is_compiling() or not sys._getframe(1).f_globals.get("__name__", "").startswith("ringtile."):
            return made
        return made.fill_(_poison(made.dtype))

    return make_poisoned


def _poisoned_new_empty(self: Tensor, *size: Any, **kwargs: Any) -> Tensor:
    # new_full, because torch.compile traces it where it cannot trace the method that this one stands in for.
    shape = kwargs.pop("size", size[0] if size and isinstance(size[0], Sequence) else size)
    return self.new_full(shape, _poison(kwargs.get("dtype") or self.dtype), **kwargs)


@pytest.fixture(autouse=True)
def _poisoned_empty(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill the uninitialised tensors that ringtile makes, with NaN or the largest integer, so that a read shows."""
    # Dynamo lists torch's functions when it first compiles, and after a reset: then those below may stand for them.
    if torch.empty not in trace_rules.get_torch_obj_rule_map():
        trace_rules.clear_lru_cache()
        trace_rules.get_torch_obj_rule_map()
    if "unpoisoned" not in request.keywords:
        for name in ("empty", "empty_like", "empty_strided"):
            monkeypatch.setattr(torch, name, _poisoned(getattr(torch, name)))
        monkeypatch.setattr(Tensor, "new_empty", _poisoned_new_empty)


@pytest.fixture(autouse=True)
def _threads_restored() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    if torch.get_num_threads() != before:
        torch.set_num_threads(before)
