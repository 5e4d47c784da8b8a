"""Policies on arms: the env of a station, people in the loop, rewards."""
