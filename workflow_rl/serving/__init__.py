"""Serving a chain: fresh from its checkpoints, or with the weights of a run."""
