"""Policies: processes, networks, chunk policies, execution and adapters (layer L3)."""

if __name__ != "robot_rl.policies":
    raise ImportError(f"import robot_rl.policies, not {__name__}: a module has one name")
