"""With data, block by block: what the linear layers of a decoder are given, on any number of ranks."""
