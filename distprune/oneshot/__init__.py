"""One-shot pruning of a decoder, block after block: solvers, and the driver that runs them over the ranks."""
