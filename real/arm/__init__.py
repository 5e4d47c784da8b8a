"""A simulated arm behind the conventions of ros2_control."""
