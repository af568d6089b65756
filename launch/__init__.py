"""Scripts that start the library on real models and texts."""
