"""What each section of the report shows, computed from a run's data: one module per section."""
