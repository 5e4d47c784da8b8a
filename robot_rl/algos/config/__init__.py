"""The settings of the algorithms: without torch, so that a mistake is answered before it is loaded."""
