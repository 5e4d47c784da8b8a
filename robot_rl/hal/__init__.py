"""Everything that can be acted on is a device (layer L1: no torch, no simulator)."""
