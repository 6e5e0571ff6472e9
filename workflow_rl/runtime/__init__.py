"""Drives loops. Knows no model maths and no training."""
