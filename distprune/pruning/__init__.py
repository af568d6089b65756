"""Score, choose, apply: what a user calls."""
