"""How much each element matters; higher = keep."""
