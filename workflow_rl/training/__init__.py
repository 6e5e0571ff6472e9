"""Training: rollouts, credit, objectives, weight sync, checkpoints and methods."""
