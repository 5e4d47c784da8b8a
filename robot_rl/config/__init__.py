"""Structured Hydra configuration: registration, validation, messages (layer L0)."""
