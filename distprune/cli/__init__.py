"""The command line: parse, build, call; no logic."""
