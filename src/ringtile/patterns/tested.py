"""Versions of Python and of other libraries with which all tests passed. ``scripts/matrix.py --record`` writes them."""

TESTED: dict[str, tuple[str, ...]] = {
    "python": ("3.11",),
    "torch": ("2.13.0",),
    "triton": ("3.6.0",),
    "transformers": ("5.24.0",),
}
