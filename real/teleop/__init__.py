"""Teleoperation: people and their devices, as one stream of intents."""
