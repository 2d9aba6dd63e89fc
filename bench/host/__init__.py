"""Runs on a node, under the benchmark venv; may import torch, never paramiko."""
