"""A simulated arm behind the ros2_control conventions."""
