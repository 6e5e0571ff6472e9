"""The ``workflow-rl`` command."""
