"""Attention over lists of keys by Triton: its kernels in the interpreter, and compiled for GPUs that are not here."""

from __future__ import annotations

import re

import pytest
import torch
from list_problems import Case, draw_inputs, draw_lists
from test_triton import check_case, needs_triton
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from triton_list_cases import CASES

from ringtile import sparse_attention
from ringtile.kernels import select, triton as backend
from ringtile.kernels.contracts import Call, Rows
from ringtile.kernels.triton import chosen
from ringtile.patterns import Causal, Chosen

# In the interpreter.


COVERED = (
    "lists that batch elements share, without limits",
    "blocks of 16 that batch elements share",
    "blocks of 64",
    "blocks of 128",
    "one query",
    "latent",
    "latent in half types",
    "the rows of a softmax over more keys",
)
"""Cases whose lines the others run, too."""


@needs_triton
@pytest.mark.xdist_group("interpreted lists")
@pytest.mark.parametrize("name", [name for name in CASES if name not in COVERED])
def test_a_case_is_right_in_the_interpreter(name: str, request: pytest.FixtureRequest) -> None:
    items = [item for item in request.session.items if getattr(item, "function", None) is request.function]
    check_case(name, "triton_list_cases.py", tuple(item.callspec.params["name"] for item in items))


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("name", COVERED)
def test_another_case_is_right_in_the_interpreter(name: str) -> None:
    check_case(name, "triton_list_cases.py", (name,))


# Compiled ahead of time.

LAYERS = {
    "latent": Case(1, 128, 1, 64, 8192, 576, 512, length=64),
    "192 and 128": Case(1, 16, 16, 64, 8192, 192, 128, length=64),
    "blocks of 128": Case(1, 64, 4, 64, 8192, 128, 128, groups=4, block=128, length=16),
    "head dim 64": Case(1, 16, 1, 64, 8192, 64, 64, length=64),
    "head dim 256": Case(1, 16, 1, 64, 8192, 256, 256, length=64),
}
PRODUCTS = re.compile("HMMA|HGMMA|UTCHMMA|FFMA")


def launches_of(name: str, dtype: torch.dtype, *, shared: bool = False) -> dict[str, object]:
    from ringtile.kernels.triton.list_launches import ListJob, backward_launches, forward_launches

    layer = LAYERS[name]
    q, k, v, *_ = draw_inputs(layer, dtype)
    v = k[..., : layer.value_dim] if shared else v
    out, lse = torch.empty(*q.shape[:3], layer.value_dim, dtype=dtype), torch.empty(q.shape[:3])
    total = torch.empty(*k.shape[:3], layer.head_dim + layer.value_dim)
    lists = draw_lists(layer)
    job, rows = ListJob(q, k, v, lists, 0.1), Rows(out, None, q, k, v, out, lse)
    found = [*forward_launches(job, out, lse), *backward_launches(job, rows, q, total)]
    return {launch.kernel.__name__: launch for launch in found}


@needs_triton
@pytest.mark.parametrize(
    ("target", "name", "dtype", "shared"),
    [
        ("sm_90", "latent", torch.bfloat16, True),
        ("sm_80", "blocks of 128", torch.float16, False),
        ("gfx942", "192 and 128", torch.bfloat16, False),
        *(
            pytest.param(*values, marks=pytest.mark.slow)
            for values in (
                *((target, "latent", torch.bfloat16, False) for target in ("sm_80", "sm_86", "sm_90", "sm_100")),
                *((target, "latent", torch.bfloat16, False) for target in ("sm_89", "sm_120", "gfx942")),
                *((target, "latent", torch.float32, False) for target in ("sm_86", "sm_90", "gfx942")),
                *(("sm_90", name, torch.bfloat16, False) for name in LAYERS if name != "latent"),
                *(("sm_80", name, torch.float16, False) for name in LAYERS if name not in ("latent", "blocks of 128")),
                *((target, "192 and 128", torch.bfloat16, False) for target in ("sm_86", "sm_100", "sm_120")),
                ("sm_86", "head dim 256", torch.float32, False),
                ("gfx942", "blocks of 128", torch.bfloat16, False),
            )
        ),
    ],
)
def test_it_fits_and_loops_use_the_tensor_cores_and_no_local_memory(
    target: str, name: str, dtype: torch.dtype, shared: bool
) -> None:
    from compiled import SHARED_BYTES, TRITON, compile_choice

    for kernel, launch in launches_of(name, dtype, shared=shared).items():
        for choice in launch.choices:
            made = compile_choice(launch, choice, target)
            if made.shared <= SHARED_BYTES[target]:
                break
        assert made.shared <= SHARED_BYTES[target], kernel
        if target.startswith("sm") and dtype != torch.float32 and kernel not in ("stats_kernel", "sum_kernel"):
            (loop,) = ("\n".join(loop) for loop in made.loops() if any(PRODUCTS.search(line) for line in loop))
            # docs/design.md says so.
            spilled = TRITON >= (3, 8) and (kernel, target, name) == ("forward_kernel", "sm_90", "latent")
            assert bool(re.search("LDL|STL", loop)) == spilled, f"{kernel}: registers are spilled, or no more"
            # The number of groups of copies that may still be on their way when a step begins.
            flying = [int(number, 16) for number in re.findall(r"DEPBAR\.LE SB0, (0x[0-9a-f]+)", loop)]
            assert choice.config.stages < 5 or min(flying) > 0, f"{kernel}: a step waits for all copies"


def test_tables_read_nothing_back_from_the_device() -> None:
    """Fake tensors have no values to read."""
    pytest.importorskip("triton")
    from ringtile.kernels.triton.list_launches import by_entry, split

    with FakeTensorMode():
        order, bounds = by_entry(torch.empty(2, 3, 10, 4, dtype=torch.int32), 7)
        starts, owner = split(bounds, 5, 15)
    assert (order.shape, bounds.shape, starts.shape, owner.shape) == ((6, 40), (6, 8), (6, 8), (6, 15))


@needs_triton
@pytest.mark.parametrize(
    ("dim", "first", "rest"),
    [(5, 16, 0), (16, 16, 0), (24, 32, 0), (64, 64, 0), (80, 64, 16), (100, 128, 0), (192, 128, 64), (576, 512, 64)],
)
def test_a_head_dim_is_padded_with_the_least(dim: int, first: int, rest: int) -> None:
    from ringtile.kernels.triton.list_launches import pieces_of

    assert pieces_of(dim) == (first, rest)


# Choice and errors.


@pytest.fixture
def interpreting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "INTERPRETED", True)
    monkeypatch.setattr(backend, "_FOUND", True)


SMALL = Case(1, 2, 1, 3, 20, 16, 16, length=4)


def asked(dtype: torch.dtype = torch.float32, dropout_p: float = 0.0, **sizes: int) -> list[str]:
    problem = SMALL._replace(**sizes)
    q, k, v, *_ = draw_inputs(problem, torch.float32)
    return chosen.unsupported(*(x.to(dtype) for x in (q, k, v)), draw_lists(problem), dropout_p)


@pytest.mark.usefixtures("interpreting")
def test_reasons() -> None:
    assert asked() == []
    assert asked(head_dim=576, value_dim=512) == []
    for found, reason in (
        (asked(head_dim=577), "knows head dims up to 576 and 512, got q.shape="),
        (asked(value_dim=513), "knows head dims up to 576 and 512, got q.shape="),
        (asked(torch.float64), "got q.dtype=torch.float64"),
        (asked(dropout_p=0.1), "does not support dropout_p, got 0.1"),
    ):
        assert len(found) == 1
        assert reason in found[0]


@pytest.mark.usefixtures("interpreting")
def test_the_interpreter_computes_only_what_is_asked_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, *_ = draw_inputs(SMALL, torch.float32)
    lists = draw_lists(SMALL)
    monkeypatch.setattr(select.native_lists, "unsupported", lambda *about: ["is not built"])
    assert select.select_lists(q, k, v, lists, Call(0, 1, 0.1)) == "blockwise"
    assert select.select_lists(q, k, v, lists, Call(0, 1, 0.1, backend="triton")) == "triton"


def test_on_a_gpu_it_comes_before_blockwise() -> None:
    assert list(select.OF_LISTS) == ["native", "triton", "blockwise"]


@pytest.mark.parametrize("option", [{"dropout_p": 0.1, "seed": 1}, {"softcap": 2.0}, {"alibi_slopes": torch.ones(2)}])
@pytest.mark.usefixtures("interpreting")
def test_options_that_it_lacks_are_named(option: dict[str, float | Tensor]) -> None:
    q, k, v, *_ = draw_inputs(SMALL, torch.float32)
    (name, *_) = option
    pattern = Causal() & Chosen(draw_lists(SMALL).indices)
    with pytest.raises(ValueError, match=rf"^backend 'triton' does not support this call: does not support {name}"):
        sparse_attention(q, k, v, pattern, enable_gqa=True, backend="triton", **option)


def test_named_without_a_gpu_it_says_what_it_needs() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    q, k, v, *_ = draw_inputs(SMALL, torch.float32)
    with pytest.raises(ValueError, match=r"backend 'triton' does not support this call: needs .*GPU"):
        sparse_attention(q, k, v, Chosen(draw_lists(SMALL).indices), enable_gqa=True, backend="triton")
