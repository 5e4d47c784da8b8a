"""Metrics, writers and reports (layer L0)."""
