"""A mask on a parameter: in place, or reparametrized as ``torch.nn.utils.prune`` does it."""
