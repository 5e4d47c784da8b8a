"""What speaks to arms: ROS 2, LeRobot's robots, a simulated arm in this process."""
