"""The ROS 2 package around `robot-rl deploy`."""
