"""Where this rank's elements sit: every layout reduced to flat indices. No communication, but to gather (FSDP2)."""
