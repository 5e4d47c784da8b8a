"""Environments of others behind our contracts."""
