"""Versions of Python and of other libraries with which all tests passed. ``scripts/matrix.py --record`` writes them."""

TESTED: dict[str, tuple[str, ...]] = {
    "python": (),
    "torch": (),
    "triton": (),
    "transformers": (),
}
