"""Benchmarks of this toolkit beside its peers: `python -m benchmarks --help`."""
