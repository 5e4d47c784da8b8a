"""System identification of arms: a recording on a station, and the robot file that comes of it."""
