"""Contracts and small tools that every layer may use (layer L0: standard library and numpy only)."""
