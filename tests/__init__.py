"""A regular package: some libraries install one of this name, and theirs would be found instead."""
