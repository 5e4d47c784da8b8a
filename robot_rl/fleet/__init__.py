"""The fleet page: what this machine has, who uses it, and buttons to stop arms (layer L5)."""
