"""What exists, who holds it, where it runs: inventory and leases (layer L2)."""
