"""Checkpoint throughput benchmark for GPU nodes: what each save mechanism really writes, and whether it is correct."""

__version__ = "0.1.0"
