"""What a GPU does, by Triton kernels, with a plain form beside each. Imported where there is a GPU."""
