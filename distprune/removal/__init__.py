"""Smaller models: which channels, heads, layers and experts go, what reads them, refitted; and what is left, cut."""
