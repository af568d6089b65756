"""The only code that talks to other ranks: a process group, an MPI communicator, or alone."""
