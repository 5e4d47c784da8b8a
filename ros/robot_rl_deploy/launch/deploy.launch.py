"""Starts `robot-rl deploy`, with `sim_arm:=true` also the simulated arm that it drives.

    ros2 launch robot_rl_deploy deploy.launch.py run:=/path/to/run station:=my_arm.yaml

When the policy ends, however it ends, the launch ends. Ctrl-C gives it time to bring the arm to rest.
"""

from launch import LaunchDescription
from launch.actions import DeclareLaunchArgument, ExecuteProcess, Shutdown
from launch.conditions import IfCondition
from launch.substitutions import LaunchConfiguration

STOP_S = "15"
"""Time from SIGINT to SIGTERM, and again to SIGKILL: the arm stops first."""


def generate_launch_description() -> LaunchDescription:
    """Returns what `ros2 launch` runs."""
    robot_rl = LaunchConfiguration("robot_rl")
    station = ["station=", LaunchConfiguration("station")]
    return LaunchDescription(
        [
            DeclareLaunchArgument("run", description="folder of the trained run"),
            DeclareLaunchArgument("station", default_value="sim_arm", description="name or YAML file"),
            DeclareLaunchArgument("sim_arm", default_value="false", description="simulate the arm, too"),
            DeclareLaunchArgument(
                "robot_rl",
                default_value="robot-rl",
                description="the command",
            ),
            ExecuteProcess(
                cmd=[robot_rl, "serve-sim-arm"],
                condition=IfCondition(LaunchConfiguration("sim_arm")),
                output="screen",
            ),
            ExecuteProcess(
                cmd=[robot_rl, "deploy", ["run=", LaunchConfiguration("run")], station],
                output="screen",
                emulate_tty=True,
                sigterm_timeout=STOP_S,
                sigkill_timeout=STOP_S,
                on_exit=Shutdown(),
            ),
        ]
    )
