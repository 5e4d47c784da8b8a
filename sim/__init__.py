"""Simulated robots and tasks: back ends, robots, tasks, experts, cameras (layer L3)."""

if __name__ != "robot_rl.sim":
    raise ImportError(f"import robot_rl.sim, not {__name__}: a module has one name")
