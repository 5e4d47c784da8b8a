"""What stands between a policy and an arm, in a process of its own; it never imports torch."""
