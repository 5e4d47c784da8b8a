"""Transitions, replay, demonstrations, normalisers (layer L2)."""
