"""Block-sparse attention in torch operations, on any device and in any floating dtype.

Row tiles whose lists have the same shape are computed together (`plan`), neighbouring columns as views, in chunks of
bounded memory (`chunks`). On a CPU the products run in torch's own flash kernel; dropout, softcap, ALiBi, second
derivatives and other devices take plain matrix products (`scores`). Half types are computed in float32.
"""

from torch import Tensor

from ringtile.kernels.blockwise.backward import backward as backward
from ringtile.kernels.blockwise.double_backward import double_backward as double_backward
from ringtile.kernels.blockwise.forward import forward as forward
from ringtile.kernels.contracts import Call


def unsupported(q: Tensor, k: Tensor, v: Tensor, call: Call) -> list[str]:
    """Reasons why this backend cannot serve a call: none, it is the fallback everywhere."""
    return []
