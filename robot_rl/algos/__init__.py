"""Learning algorithms and the formulas they share (layer L3)."""
