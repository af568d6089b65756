"""Which elements compete with each other, and the exact choice among them over ranks."""
