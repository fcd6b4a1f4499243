"""Compare the native kernel of the ringtile that is installed with the reference: python scripts/try_install.py"""

import sys
from pathlib import Path

import torch

import ringtile
from ringtile.kernels.native.library import library
from ringtile.patterns import Causal

assert "site-packages" in Path(ringtile.__file__).parts, ringtile.__file__
q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, 2, 300, 64).unbind())
found, expected = (ringtile.sparse_attention(q, k, v, Causal(), backend=name) for name in ("native", "reference"))
torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
for ours, theirs in zip(*(torch.autograd.grad(x.sum(), (q, k, v)) for x in (found, expected)), strict=True):
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
names = ", ".join(each.name for each in library().sets)
print(f"Python {sys.version.split()[0]}, torch {torch.__version__}: the native kernel is right, {names}")
