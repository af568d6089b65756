"""Sparse training in the trainers of other libraries. Each is imported by its own name, and needs its package."""
