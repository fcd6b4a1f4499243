"""Measuring: the benchmark, its peers and records, profiles, memory, and what the machine is."""
