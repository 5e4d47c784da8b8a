"""Robot learning where simulated arms, real arms and world models are schedulable devices."""

__version__ = "0.1.0"
