"""What a run is told: typed configuration and prompt files. Reads without PyTorch."""
