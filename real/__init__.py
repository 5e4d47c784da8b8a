"""Real robots: ROS 2, drivers, stations, safety supervision, the simulated arm (layer L3)."""

if __name__ != "robot_rl.real":
    raise ImportError(f"import robot_rl.real, not {__name__}: a module has one name")
