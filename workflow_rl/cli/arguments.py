"""Arguments that several commands have."""

from pathlib import Path
from typing import Annotated

import typer

ConfigArgument = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="Configuration in YAML.", show_default=False)
]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Changes to the configuration: dotted key, value in YAML.",
        show_default=False,
    ),
]
