"""Robots: models, limits, and the short file that makes any MJCF an arm."""
