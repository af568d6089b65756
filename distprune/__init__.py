"""Prune sharded PyTorch models in the layout they are already in."""
