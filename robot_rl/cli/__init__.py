"""The command line, one file per command (layer L5)."""
