"""`ros2 run robot_rl_deploy robot_rl <command> [key=value ...]`: the same as `robot-rl`."""

import sys


def main() -> int:
    """Runs robot-rl; what ROS adds to the command line is not for it."""
    try:
        from robot_rl.cli.main import main as robot_rl
    except ImportError as error:
        sys.stderr.write(
            f"robot_rl_deploy: {sys.executable} cannot import robot_rl ({error}). Install it for this "
            "interpreter: pip install robot-rl\n"
        )
        return 1
    words = sys.argv[1:]
    return robot_rl(words[: words.index("--ros-args")] if "--ros-args" in words else words)


if __name__ == "__main__":
    sys.exit(main())
