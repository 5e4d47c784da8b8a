"""LeRobotDataset: layout, writing, reading."""
