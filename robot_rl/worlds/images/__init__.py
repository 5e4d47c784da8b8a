"""Pictures in a world model: a small autoencoder, and flows in its codes."""
