"""Measurements against named peers and physical limits (layer L4)."""
