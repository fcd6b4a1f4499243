"""Checks for attention of yours, against dense float64 attention."""

from ringtile.testing.cases import Case, Shape
from ringtile.testing.check import Failure, Report, check_attention, check_case

__all__ = ["Case", "Failure", "Report", "Shape", "check_attention", "check_case"]
