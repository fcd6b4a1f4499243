"""Failures of ranks: facts that differ, ranks that are lost, and the one line that every rank gets."""
