"""Evaluation: how good a chain is on prompts it was not trained on, and how sure that is."""
