"""FlashAttention as a backend. Stand-ins have the names and arguments of each version and compute on the CPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ringtile import sparse_attention
from ringtile.kernels import flash
from ringtile.kernels.contracts import Rows
from ringtile.kernels.flash import Torch
from ringtile.patterns import Causal, Dense, GlobalTokens, Pattern, Strided, Window, parse
from ringtile.patterns.facts import Band, band_of
from ringtile.testing.oracle import attention

CUTE, THREE, TWO = "flash_attn.cute.interface", "flash_attn_3.flash_attn_interface", "flash_attn.flash_attn_interface"


def kept_by(q: Tensor, k: Tensor, left: int, right: int, causal: bool) -> Tensor:
    """FlashAttention's own rule, -1 for no end."""
    i = torch.arange(q.shape[1]).unsqueeze(1) + k.shape[1] - q.shape[1]
    j = torch.arange(k.shape[1])
    right = 0 if causal else right
    return ((left < 0) | (j >= i - left)) & ((right < 0) | (j <= i + right))


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, *sides: Any) -> tuple[Tensor, Tensor]:
    """``[B, N, H, D]``; results in float64."""
    out, lse = attention(*(x.transpose(1, 2) for x in (q, k, v)), kept_by(q, k, *sides), scale=scale)
    return out.transpose(1, 2), lse


def grads_of(out_grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rule: Any) -> list[Tensor]:
    """From out and lse as they came, as a kernel computes them; ``rule`` is scale, left, right, causal."""
    scale, *sides = rule
    groups = q.shape[2] // k.shape[2]
    wide, grad, given, keys, values = (x.double().transpose(1, 2) for x in (q, out_grad, out, k, v))
    keys, values = (x.repeat_interleave(groups, 1) for x in (keys, values))
    p = torch.exp(wide @ keys.mT * scale - lse.double().unsqueeze(-1)).masked_fill(~kept_by(q, k, *sides), 0)
    ds = p * (grad @ values.mT - (grad * given).sum(-1, keepdim=True)) * scale
    sums = (x.unflatten(1, (-1, groups)).sum(2) for x in (ds.mT @ wide, p.mT @ grad))
    return [x.transpose(1, 2).to(q.dtype) for x in (ds @ keys, *sums)]


def two(wrong_scale: float = 1.0) -> ModuleType:
    """FlashAttention 2."""
    module = ModuleType(TWO)

    def _flash_attn_forward(
        q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
        return_softmax,
    ):  # fmt: skip
        assert (dropout_p, softcap, alibi_slopes, return_softmax) == (0.0, 0.0, None, False)
        scale = softmax_scale * wrong_scale
        out, lse = attend(q, k, v, scale, window_size_left, window_size_right, causal)
        return out.to(q.dtype), lse.float(), None, None

    def _flash_attn_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left,
        window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
    ):  # fmt: skip
        rule = softmax_scale, window_size_left, window_size_right, causal
        for x, y in zip((dq, dk, dv), grads_of(dout, q, k, v, out, softmax_lse, *rule), strict=True):
            x.copy_(y)

    module._flash_attn_forward, module._flash_attn_backward = _flash_attn_forward, _flash_attn_backward
    return module


def three() -> ModuleType:
    """FlashAttention 3."""
    module = ModuleType(THREE)

    def _flash_attn_forward(
        q, k, v, k_new=None, *, softmax_scale=None, causal=False, window_size_left=-1, window_size_right=-1, softcap=0.0
    ):
        out, lse = attend(q, k, v, softmax_scale, window_size_left, window_size_right, causal)
        return out.to(q.dtype), lse.float(), None, None

    def _flash_attn_backward(
        dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, *, dq=None, dk=None, dv=None, softmax_scale=None,
        is_causal=False, window_size_left=-1, window_size_right=-1, softcap=0.0, deterministic=False, sm_margin=0,
    ):  # fmt: skip
        rule = softmax_scale, window_size_left, window_size_right, is_causal
        for x, y in zip((dq, dk, dv), grads_of(dout, q, k, v, out, softmax_lse, *rule), strict=True):
            x.copy_(y)

    module._flash_attn_forward, module._flash_attn_backward = _flash_attn_forward, _flash_attn_backward
    return module


def cute() -> ModuleType:
    """FlashAttention 4: None, not -1, for a side without an end, which with causal is not asked for."""
    module = ModuleType(CUTE)

    def sides(causal: bool, left: int | None, right: int | None) -> tuple[int, int, bool]:
        assert not (causal and (left, right) != (None, None))
        return -1 if left is None else left, -1 if right is None else right, causal

    def _flash_attn_fwd(
        q, k, v, qv=None, *, softmax_scale=None, causal=False, softcap=None, window_size_left=None,
        window_size_right=None, return_lse=False,
    ):  # fmt: skip
        out, lse = attend(q, k, v, softmax_scale, *sides(causal, window_size_left, window_size_right))
        return out.to(q.dtype), lse.float() if return_lse else None, None, None

    def _flash_attn_bwd(
        q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None,
        window_size_right=None, *, deterministic=False, dlse=None,
    ):  # fmt: skip
        rule = softmax_scale, *sides(causal, window_size_left, window_size_right)
        return tuple(grads_of(dout, q, k, v, out, lse, *rule))

    module._flash_attn_fwd, module._flash_attn_bwd = _flash_attn_fwd, _flash_attn_bwd
    return module


MADE = {CUTE: cute, THREE: three, TWO: two}


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The CPU in the place of a GPU, and none of the packages."""
    monkeypatch.setattr(flash, "DEVICE", "cpu")
    flash.proven.cache_clear()
    yield
    flash.proven.cache_clear()


def install(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
    for module in modules:
        parts = module.__name__.split(".")
        for end in range(1, len(parts)):
            package = sys.modules.get(".".join(parts[:end])) or ModuleType(".".join(parts[:end]))
            package.__path__ = []
            monkeypatch.setitem(sys.modules, package.__name__, package)
        module.__spec__ = object()
        monkeypatch.setitem(sys.modules, module.__name__, module)


def tensors(n: int, m: int, heads: int = 4, key_heads: int = 2, head_dim: int = 20, dtype: Any = torch.bfloat16) -> Any:
    torch.manual_seed(0)
    shapes = (2, heads, n, head_dim), (2, key_heads, m, head_dim), (2, key_heads, m, head_dim)
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("text", ["dense", "causal", "window(30, 7)", "causal & window(25, 0)", "window(400, 3)"])
def test_every_version_serves_bands_with_all_gradients(name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, MADE[name]())
    inputs = tensors(77, 131)
    results = []
    for backend in ("flash", "reference"):
        out, lse = sparse_attention(*inputs, parse(text), enable_gqa=True, return_lse=True, backend=backend)
        loss = (out.double() * torch.linspace(-1, 1, 20)).sum() + (lse.double() * torch.linspace(0, 1, 77)).sum()
        results.append((out, lse, *torch.autograd.grad(loss, inputs)))
    for found, expected in zip(*results, strict=True):
        assert found.dtype == expected.dtype
        assert found.shape == expected.shape
        scale = expected.double().abs().max()
        assert (found.double() - expected.double()).abs().max() <= 2**-6 * scale
    assert results[0][0].stride() == results[1][0].transpose(1, 2).contiguous().transpose(1, 2).stride()


def test_the_newest_version_that_is_right_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = cute()
    rightly = wrong._flash_attn_fwd
    wrong._flash_attn_fwd = lambda q, k, v, **rest: rightly(q, k.flip(1), v, **rest)
    install(monkeypatch, wrong, two())
    source = flash.proven("cpu", torch.bfloat16, 16, False, (False, False, False))
    assert isinstance(source, flash._Ampere)
    install(monkeypatch, cute())
    flash.proven.cache_clear()
    assert isinstance(flash.proven("cpu", torch.bfloat16, 16, False, (False, False, False)), flash._Cute)


def test_wrong_kernels_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    old = ModuleType(THREE)
    old._flash_attn_forward = lambda q, k, v, causal: None
    install(monkeypatch, two(wrong_scale=1.1), old)
    with pytest.raises(RuntimeError) as refused:
        sparse_attention(*tensors(30, 30), Causal(), enable_gqa=True, backend="flash")
    said = str(refused.value)
    assert f"{TWO} is wrong: out by" in said
    assert f"{THREE} fails: " in said
    assert "softmax_scale" in said
    assert "torch fails: " in said  # its kernels are for GPUs


def test_a_package_that_does_not_load_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> ModuleType:
        raise ImportError("undefined symbol: x")

    install(monkeypatch, two())
    monkeypatch.setattr(flash.importlib, "import_module", load)
    assert next(flash._sources()) == (TWO, "does not load: undefined symbol: x")


@pytest.mark.parametrize(
    ("pattern", "options", "sizes", "reason"),
    [
        (Window(3) | GlobalTokens(2), {}, {}, "supports all pairs, causal and windows"),
        (Causal(), {"start": 0}, {}, "aligns the last query with the last key"),
        (Causal(), {"dropout_p": 0.1}, {}, "dropout_p"),
        (Causal(), {"softcap": 2.0}, {}, "softcap"),
        (Causal(), {"scale": -1.0}, {}, "scale > 0"),
        (Dense(), {"key_mask": torch.ones(2, 40, dtype=torch.bool)}, {}, "key_bits"),
        (Dense(), {"key_lengths": torch.tensor([3, 4])}, {}, "key_lengths"),
        (Dense(), {"alibi_slopes": torch.ones(4)}, {}, "alibi_slopes"),
        (Dense(), {}, {"dtype": torch.float32}, "got q.dtype"),
        (Dense(), {}, {"head_dim": 256}, "head dims up to 255"),
    ],
    ids=str,
)
def test_what_it_does_not_know_is_a_reason(
    pattern: Pattern, options: dict[str, Any], sizes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=f"backend 'flash' does not support this call.*{reason}"):
        sparse_attention(*tensors(30, 40, **sizes), pattern, enable_gqa=True, backend="flash", **options)


def test_it_serves_only_where_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, two())
    monkeypatch.setattr(flash, "forward", lambda *_: pytest.fail("was not named"))
    assert sparse_attention(*tensors(9, 9), enable_gqa=True).isfinite().all()


def test_a_gpu_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "DEVICE", "cuda")
    with pytest.raises(ValueError, match="needs a GPU, got cpu"):
        sparse_attention(*tensors(9, 9), enable_gqa=True, backend="flash")


@pytest.mark.parametrize(
    ("pattern", "band"),
    [
        (Dense(), Band(None, None)),
        (Causal(), Band(None, 0)),
        (Window(5), Band(5, 5)),
        (Window(5, 2) & Window(3, 4), Band(3, 2)),
        (Causal() & Window(5), Band(5, 0)),
        (Causal() & GlobalTokens(3), None),
        (~Causal(), None),
    ],
    ids=str,
)
def test_what_is_a_band(pattern: Pattern, band: Band | None) -> None:
    assert band_of(pattern) == band


def test_it_serves_in_a_compiled_function(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, two())
    inputs = [x.detach() for x in tensors(40, 40)]
    for rule in (Window(9), Strided(9)):
        call = lambda q, k, v, rule=rule: sparse_attention(q, k, v, rule, enable_gqa=True, backend="flash")  # noqa: E731
        compiled = torch.compile(call, backend="eager")
        if rule == Window(9):
            assert torch.equal(compiled(*inputs), call(*inputs))
        else:
            with pytest.raises(ValueError, match="supports all pairs, causal and windows"):
                compiled(*inputs)


@pytest.mark.parametrize("band", [Band(None, None), Band(None, 0), Band(30, 7)])
def test_torchs_own_copy_takes_what_it_is_given(band: Band) -> None:
    # No kernel runs: torch's operators say, for tensors that hold nothing, whether they take these arguments.
    with FakeTensorMode():
        q = torch.empty(2, 77, 4, 24, dtype=torch.bfloat16, device="cuda")
        k, v = torch.empty(2, 2, 131, 2, 24, dtype=torch.bfloat16, device="cuda").unbind()
        out, lse = Torch().forward(q, k, v, band, 0.2)
        assert (out.shape, lse.shape, lse.dtype) == (q.shape, (2, 4, 77), torch.float32)
        grads = Torch().backward(Rows(out, None, q, k, v, out, lse), band, 0.2)
        assert [grad.shape for grad in grads] == [q.shape, k.shape, v.shape]
