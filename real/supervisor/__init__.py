"""The process between a policy and an arm; it never imports torch."""
