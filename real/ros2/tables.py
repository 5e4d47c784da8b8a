"""Definitions of ROS types that rosbags lacks, in ROS's own .msg, .srv and .action text.

`;` stands for a line end. Tests compare the type hashes with those in code that ROS generated, so that
they find every wrong field. Generated code was not found of ListHardwareInterfaces, the response of
SwitchController (here as in the source since 4.2x), JointTrajectoryControllerState with its
speed_scaling_factor (control_msgs 5.3), Jazzy's HardwareComponentState with the `data_type` of its
interfaces, and what Humble defines otherwise.
"""

from __future__ import annotations

DEFINITIONS: dict[str, str] = {
    "std_srvs/srv/SetBool": "bool data; ---; bool success; string message",
    "std_srvs/srv/Trigger": "---; bool success; string message",
    "action_msgs/srv/CancelGoal": (
        "GoalInfo goal_info; ---; int8 ERROR_NONE=0; int8 ERROR_REJECTED=1; int8 ERROR_UNKNOWN_GOAL_ID=2;"
        "int8 ERROR_GOAL_TERMINATED=3; int8 return_code; GoalInfo[] goals_canceling"
    ),
    # Parameters and life cycle.
    "rcl_interfaces/srv/DescribeParameters": "string[] names; ---; ParameterDescriptor[] descriptors",
    "rcl_interfaces/srv/GetParameters": "string[] names; ---; ParameterValue[] values",
    "rcl_interfaces/srv/GetParameterTypes": "string[] names; ---; uint8[] types",
    "rcl_interfaces/srv/ListParameters": (
        "uint64 DEPTH_RECURSIVE=0; string[] prefixes; uint64 depth; ---; ListParametersResult result"
    ),
    "rcl_interfaces/srv/SetParameters": "Parameter[] parameters; ---; SetParametersResult[] results",
    "rcl_interfaces/srv/SetParametersAtomically": "Parameter[] parameters; ---; SetParametersResult result",
    "lifecycle_msgs/srv/ChangeState": "Transition transition; ---; bool success",
    "lifecycle_msgs/srv/GetState": "---; State current_state",
    "lifecycle_msgs/srv/GetAvailableStates": "---; State[] available_states",
    "lifecycle_msgs/srv/GetAvailableTransitions": "---; TransitionDescription[] available_transitions",
    # Controllers: ros-controls/control_msgs.
    "control_msgs/msg/JointTolerance": (
        "string name; float64 position; float64 velocity; float64 acceleration"
    ),
    "control_msgs/msg/JointComponentTolerance": (
        "uint16 X_AXIS=1; uint16 Y_AXIS=2; uint16 Z_AXIS=3; uint16 TRANSLATION=4; uint16 ROTATION=5;"
        "string joint_name; uint16 component; float64 position; float64 velocity; float64 acceleration"
    ),
    "control_msgs/msg/GripperCommand": "float64 position; float64 max_effort",
    "control_msgs/msg/JointTrajectoryControllerState": (
        "std_msgs/Header header; string[] joint_names;"
        "trajectory_msgs/JointTrajectoryPoint reference; trajectory_msgs/JointTrajectoryPoint feedback;"
        "trajectory_msgs/JointTrajectoryPoint error; trajectory_msgs/JointTrajectoryPoint output;"
        "string[] multi_dof_joint_names;"
        "trajectory_msgs/MultiDOFJointTrajectoryPoint multi_dof_reference;"
        "trajectory_msgs/MultiDOFJointTrajectoryPoint multi_dof_feedback;"
        "trajectory_msgs/MultiDOFJointTrajectoryPoint multi_dof_error;"
        "trajectory_msgs/MultiDOFJointTrajectoryPoint multi_dof_output; float64 speed_scaling_factor"
    ),
    "control_msgs/action/FollowJointTrajectory": (
        "trajectory_msgs/JointTrajectory trajectory;"
        "trajectory_msgs/MultiDOFJointTrajectory multi_dof_trajectory;"
        "JointTolerance[] path_tolerance; JointComponentTolerance[] component_path_tolerance;"
        "JointTolerance[] goal_tolerance; JointComponentTolerance[] component_goal_tolerance;"
        "builtin_interfaces/Duration goal_time_tolerance; ---;"
        "int32 SUCCESSFUL=0; int32 INVALID_GOAL=-1; int32 INVALID_JOINTS=-2; int32 OLD_HEADER_TIMESTAMP=-3;"
        "int32 PATH_TOLERANCE_VIOLATED=-4; int32 GOAL_TOLERANCE_VIOLATED=-5;"
        "int32 error_code; string error_string; ---;"
        "std_msgs/Header header; string[] joint_names;"
        "trajectory_msgs/JointTrajectoryPoint desired; trajectory_msgs/JointTrajectoryPoint actual;"
        "trajectory_msgs/JointTrajectoryPoint error; string[] multi_dof_joint_names;"
        "trajectory_msgs/MultiDOFJointTrajectoryPoint multi_dof_desired;"
        "trajectory_msgs/MultiDOFJointTrajectoryPoint multi_dof_actual;"
        "trajectory_msgs/MultiDOFJointTrajectoryPoint multi_dof_error"
    ),
    "control_msgs/action/GripperCommand": (
        "GripperCommand command; ---; float64 position; float64 effort; bool stalled; bool reached_goal;"
        "---; float64 position; float64 effort; bool stalled; bool reached_goal"
    ),
    # ros-controls/ros2_control: controller_manager_msgs.
    "controller_manager_msgs/msg/ChainConnection": "string name; string[] reference_interfaces",
    "controller_manager_msgs/msg/ControllerState": (
        "string name; string state; string type; bool is_async; uint16 update_rate;"
        "string[] claimed_interfaces; string[] required_command_interfaces;"
        "string[] required_state_interfaces; bool is_chainable; bool is_chained;"
        "string[] exported_state_interfaces; string[] reference_interfaces;"
        "ChainConnection[] chain_connections"
    ),
    "controller_manager_msgs/msg/HardwareInterface": (
        "string name; string data_type; bool is_available; bool is_claimed"
    ),
    "controller_manager_msgs/msg/HardwareComponentState": (
        "string name; string type; bool is_async; uint16 rw_rate; string plugin_name;"
        "lifecycle_msgs/State state; HardwareInterface[] command_interfaces;"
        "HardwareInterface[] state_interfaces"
    ),
    "controller_manager_msgs/srv/ListControllers": "---; ControllerState[] controller",
    "controller_manager_msgs/srv/ListControllerTypes": "---; string[] types; string[] base_classes",
    "controller_manager_msgs/srv/ListHardwareComponents": "---; HardwareComponentState[] component",
    "controller_manager_msgs/srv/ListHardwareInterfaces": (
        "---; HardwareInterface[] command_interfaces; HardwareInterface[] state_interfaces"
    ),
    "controller_manager_msgs/srv/LoadController": "string name; ---; bool ok",
    "controller_manager_msgs/srv/ConfigureController": "string name; ---; bool ok",
    "controller_manager_msgs/srv/UnloadController": "string name; ---; bool ok",
    "controller_manager_msgs/srv/SetHardwareComponentState": (
        "string name; lifecycle_msgs/State target_state; ---; bool ok; lifecycle_msgs/State state"
    ),
    "controller_manager_msgs/srv/SwitchController": (
        "string[] activate_controllers; string[] deactivate_controllers; int32 strictness;"
        "int32 BEST_EFFORT=1; int32 STRICT=2; int32 AUTO=3; int32 FORCE_AUTO=4;"
        "bool activate_asap; builtin_interfaces/Duration timeout; ---; bool ok; string message"
    ),
    # MoveIt Servo.
    "moveit_msgs/srv/ServoCommandType": (
        "int8 JOINT_JOG=0; int8 TWIST=1; int8 POSE=2; int8 command_type; ---; bool success"
    ),
}

_CONTROLLER_STATE = (
    "string name; string state; string type; string[] claimed_interfaces;"
    "string[] required_command_interfaces; string[] required_state_interfaces; bool is_chainable;"
    "bool is_chained; string[] reference_interfaces; ChainConnection[] chain_connections"
)

_HARDWARE_INTERFACE = "string name; bool is_available; bool is_claimed"
_COMPONENT_STATE = (
    "lifecycle_msgs/State state; HardwareInterface[] command_interfaces; HardwareInterface[] state_interfaces"
)

OF_DISTRO: dict[str, dict[str, str]] = {
    "humble": {
        "controller_manager_msgs/msg/ControllerState": _CONTROLLER_STATE,
        "controller_manager_msgs/msg/HardwareInterface": _HARDWARE_INTERFACE,
        "controller_manager_msgs/msg/HardwareComponentState": (
            f"string name; string type; string class_type; {_COMPONENT_STATE}"
        ),
        "controller_manager_msgs/srv/SwitchController": (
            "string[] activate_controllers; string[] deactivate_controllers;"
            "string[] start_controllers; string[] stop_controllers; int32 strictness;"
            "int32 BEST_EFFORT=1; int32 STRICT=2; int32 AUTO=3; int32 FORCE_AUTO=4;"
            "bool start_asap; bool activate_asap; builtin_interfaces/Duration timeout; ---; bool ok"
        ),
        "control_msgs/msg/JointTrajectoryControllerState": (
            "std_msgs/Header header; string[] joint_names;"
            "trajectory_msgs/JointTrajectoryPoint reference; trajectory_msgs/JointTrajectoryPoint feedback;"
            "trajectory_msgs/JointTrajectoryPoint error; trajectory_msgs/JointTrajectoryPoint output;"
            "trajectory_msgs/JointTrajectoryPoint desired; trajectory_msgs/JointTrajectoryPoint actual;"
            "string[] multi_dof_joint_names;"
            "trajectory_msgs/MultiDOFJointTrajectoryPoint multi_dof_reference;"
            "trajectory_msgs/MultiDOFJointTrajectoryPoint multi_dof_feedback;"
            "trajectory_msgs/MultiDOFJointTrajectoryPoint multi_dof_error;"
            "trajectory_msgs/MultiDOFJointTrajectoryPoint multi_dof_output;"
            "trajectory_msgs/MultiDOFJointTrajectoryPoint multi_dof_desired;"
            "trajectory_msgs/MultiDOFJointTrajectoryPoint multi_dof_actual"
        ),
    },
    "iron": {
        "control_msgs/msg/JointTrajectoryControllerState": DEFINITIONS[
            "control_msgs/msg/JointTrajectoryControllerState"
        ].removesuffix("; float64 speed_scaling_factor"),
        "controller_manager_msgs/msg/ControllerState": _CONTROLLER_STATE,
        "controller_manager_msgs/msg/HardwareInterface": _HARDWARE_INTERFACE,
        "controller_manager_msgs/msg/HardwareComponentState": (
            f"string name; string type; string class_type; string plugin_name; {_COMPONENT_STATE}"
        ),
        "controller_manager_msgs/srv/SwitchController": (
            "string[] activate_controllers; string[] deactivate_controllers; int32 strictness;"
            "int32 BEST_EFFORT=1; int32 STRICT=2; int32 AUTO=3; int32 FORCE_AUTO=4;"
            "bool activate_asap; builtin_interfaces/Duration timeout; ---; bool ok"
        ),
    },
    "jazzy": {
        "controller_manager_msgs/msg/HardwareComponentState": (  # `class_type` went in Kilted
            "string name; string type; bool is_async; uint16 rw_rate; string class_type; string plugin_name;"
            f"{_COMPONENT_STATE}"
        ),
    },
}
"""What a distribution defines otherwise."""

DEFAULTS: dict[str, dict[str, float]] = {"geometry_msgs/msg/Quaternion": {"w": 1.0}}
"""Default values other than zero in the types that rosbags brings; it drops them."""
