"""`ros2 run robot_rl_deploy robot_rl <command> [key=value ...]`: the same as `robot-rl`."""

import sys


def main() -> int:
    """Runs robot-rl; what ROS adds to the command line is not for it, and is said to be of no effect."""
    try:
        from robot_rl.cli.main import main as robot_rl
    except ImportError as error:
        sys.stderr.write(
            f"robot_rl_deploy: {sys.executable} cannot import robot_rl ({error}). Install it for this "
            "interpreter: pip install robot-rl\n"
        )
        return 1
    words = sys.argv[1:]
    if "--ros-args" not in words:
        return robot_rl(words)
    end = words.index("--ros-args")
    if words[end + 1 :]:
        # The processes of a station open their own nodes: rules given here would move one of them.
        sys.stderr.write(
            f"robot_rl_deploy: no effect: {' '.join(words[end:])}. Names are in the station file: "
            "ros2.namespace, ros2.remap and ros2.use_sim_time.\n"
        )
    return robot_rl(words[:end])


if __name__ == "__main__":
    sys.exit(main())
