"""Block-sparse attention in PyTorch operations, on any device and in any floating dtype.

Row tiles whose lists have the same shape are computed together (`plan`), in chunks of bounded memory (`chunks`). On a
CPU, PyTorch's own flash kernel computes the matmuls. Dropout, softcap, ALiBi, second derivatives and other devices use
plain matmuls (`scores`). Half precision is computed in float32.
"""

from torch import Tensor

from ringtile.kernels.blockwise.backward import backward as backward
from ringtile.kernels.blockwise.double_backward import double_backward as double_backward
from ringtile.kernels.blockwise.forward import forward as forward
from ringtile.kernels.contracts import Call


def unsupported(q: Tensor, k: Tensor, v: Tensor, call: Call) -> list[str]:
    """Return no reasons: this backend is the fallback everywhere."""
    return []
