"""Rewards: scores for what a stage made, and failures that never turn into scores.

Import from the modules: this package imports nothing by itself, so that a configuration can be
checked without loading torch.
"""
