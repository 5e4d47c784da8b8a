"""Acting: the one stepper, the sources of a run made of it, and how the newest weights reach them."""
