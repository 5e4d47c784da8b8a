"""A package of somebody else, as robot_rl finds it: by the entry points of its pyproject.toml."""
