"""Crash-safe episodes: appended while the robot moves, sealed into a LeRobotDataset afterwards."""
