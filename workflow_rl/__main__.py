"""``python -m workflow_rl``."""

from workflow_rl.cli.main import main

main()
