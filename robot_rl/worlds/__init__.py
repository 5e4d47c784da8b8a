"""World models: learned simulators that say how far they can be believed."""
