"""The kernels themselves. Needs Triton, so it is imported through :func:`distprune.kernels.available.kernels`."""
