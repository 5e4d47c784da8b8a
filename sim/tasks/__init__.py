"""Tasks: a scene, a reset distribution, success, and an expert."""
