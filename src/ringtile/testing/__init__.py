"""Checks for attention of yours, against dense float64 attention."""
