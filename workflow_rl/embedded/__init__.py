"""The embedded pair of models, the world it is trained on, and its pre-training."""
