"""``torch.nn.utils.prune``, its classes and functions, on modules in any layout."""
