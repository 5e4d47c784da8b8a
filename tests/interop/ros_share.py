"""Message definitions as a ROS installation has them, for peers that read them from files.

Written by hand after the ROS packages (Jazzy), fields only: a peer that took them from our own
tables would make the same mistake as the tables.
"""

import re
from pathlib import Path

DEFINITIONS = {
    "builtin_interfaces/msg/Time": "int32 sec\nuint32 nanosec\n",
    "builtin_interfaces/msg/Duration": "int32 sec\nuint32 nanosec\n",
    "std_msgs/msg/Header": "builtin_interfaces/Time stamp\nstring frame_id\n",
    "unique_identifier_msgs/msg/UUID": "uint8[16] uuid\n",
    "action_msgs/msg/GoalInfo": "unique_identifier_msgs/UUID goal_id\nbuiltin_interfaces/Time stamp\n",
    "action_msgs/msg/GoalStatus": "GoalInfo goal_info\nint8 status\n",
    "action_msgs/msg/GoalStatusArray": "GoalStatus[] status_list\n",
    "action_msgs/srv/CancelGoal": "GoalInfo goal_info\n---\nint8 return_code\nGoalInfo[] goals_canceling\n",
    "geometry_msgs/msg/Vector3": "float64 x\nfloat64 y\nfloat64 z\n",
    "geometry_msgs/msg/Quaternion": "float64 x\nfloat64 y\nfloat64 z\nfloat64 w\n",
    "geometry_msgs/msg/Transform": "Vector3 translation\nQuaternion rotation\n",
    "geometry_msgs/msg/Twist": "Vector3 linear\nVector3 angular\n",
    "sensor_msgs/msg/JointState": (
        "std_msgs/Header header\nstring[] name\nfloat64[] position\nfloat64[] velocity\nfloat64[] effort\n"
    ),
    "std_srvs/srv/SetBool": "bool data\n---\nbool success\nstring message\n",
    "trajectory_msgs/msg/JointTrajectoryPoint": (
        "float64[] positions\nfloat64[] velocities\nfloat64[] accelerations\nfloat64[] effort\n"
        "builtin_interfaces/Duration time_from_start\n"
    ),
    "trajectory_msgs/msg/JointTrajectory": (
        "std_msgs/Header header\nstring[] joint_names\nJointTrajectoryPoint[] points\n"
    ),
    "trajectory_msgs/msg/MultiDOFJointTrajectoryPoint": (
        "geometry_msgs/Transform[] transforms\ngeometry_msgs/Twist[] velocities\n"
        "geometry_msgs/Twist[] accelerations\nbuiltin_interfaces/Duration time_from_start\n"
    ),
    "trajectory_msgs/msg/MultiDOFJointTrajectory": (
        "std_msgs/Header header\nstring[] joint_names\nMultiDOFJointTrajectoryPoint[] points\n"
    ),
    "control_msgs/msg/JointTolerance": (
        "string name\nfloat64 position\nfloat64 velocity\nfloat64 acceleration\n"
    ),
    "control_msgs/msg/JointComponentTolerance": (
        "string joint_name\nuint16 component\nfloat64 position\nfloat64 velocity\nfloat64 acceleration\n"
    ),
    "control_msgs/action/FollowJointTrajectory": (
        "trajectory_msgs/JointTrajectory trajectory\n"
        "trajectory_msgs/MultiDOFJointTrajectory multi_dof_trajectory\n"
        "JointTolerance[] path_tolerance\nJointComponentTolerance[] component_path_tolerance\n"
        "JointTolerance[] goal_tolerance\nJointComponentTolerance[] component_goal_tolerance\n"
        "builtin_interfaces/Duration goal_time_tolerance\n"
        "---\n"
        "int32 error_code\nstring error_string\n"
        "---\n"
        "std_msgs/Header header\nstring[] joint_names\n"
        "trajectory_msgs/JointTrajectoryPoint desired\n"
        "trajectory_msgs/JointTrajectoryPoint actual\n"
        "trajectory_msgs/JointTrajectoryPoint error\n"
        "string[] multi_dof_joint_names\n"
        "trajectory_msgs/MultiDOFJointTrajectoryPoint multi_dof_desired\n"
        "trajectory_msgs/MultiDOFJointTrajectoryPoint multi_dof_actual\n"
        "trajectory_msgs/MultiDOFJointTrajectoryPoint multi_dof_error\n"
    ),
}
"""ROS type -> the text of its file."""


def write_share(prefix: Path) -> None:
    """Writes `prefix`/share/<package>/{package.xml,msg,srv,action}, as AMENT_PREFIX_PATH has them."""
    depends: dict[str, set[str]] = {}
    for name, text in DEFINITIONS.items():
        package, kind, short = name.split("/")
        folder = prefix / "share" / package / kind
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{short}.{kind}").write_text(text, encoding="utf-8")
        depends.setdefault(package, set()).update(re.findall(r"(\w+)/", text))
    for package, needed in depends.items():
        tags = "".join(f"<depend>{other}</depend>" for other in sorted(needed))
        (prefix / "share" / package / "package.xml").write_text(
            f'<package format="3"><name>{package}</name><version>0.0.0</version>{tags}</package>\n',
            encoding="utf-8",
        )
