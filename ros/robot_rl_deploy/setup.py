"""What colcon installs: the package's marker, its manifest, the launch file and one executable."""

from setuptools import setup

NAME = "robot_rl_deploy"

setup(
    name=NAME,
    version="0.1.0",
    packages=[NAME],
    data_files=[
        ("share/ament_index/resource_index/packages", [f"resource/{NAME}"]),
        (f"share/{NAME}", ["package.xml"]),
        (f"share/{NAME}/launch", ["launch/deploy.launch.py"]),
    ],
    install_requires=["setuptools"],
    zip_safe=True,
    maintainer="robot_rl",
    maintainer_email="dev@robot-rl.invalid",
    description="Starts robot-rl deploy from a ROS 2 launch file",
    license="Apache-2.0",
    entry_points={"console_scripts": [f"robot_rl = {NAME}.main:main"]},
)
