"""Ways to improve a cloned base: one file each, chosen by `method`, all with the same loop."""
