"""Teleoperation: input devices of people, as one stream of intents."""
