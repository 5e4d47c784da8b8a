"""Fake envs, robots, arms and servos that misbehave on purpose, for our tests and those of other packages."""
