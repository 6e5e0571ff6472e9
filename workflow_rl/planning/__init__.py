"""What a run would need, counted on the real architectures without their weights."""
