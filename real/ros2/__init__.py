"""ROS 2 with or without ROS installed: one node interface, two transports."""
