"""Envs, robots, arms and servos that lie on purpose: for our tests and for those who extend the platform."""
