"""The prompt text that a reward network was trained with, read from where it was published.

Such a text is part of the weights: with another one the scores mean nothing. It is not ours to
ship, so the user names the file.
"""

import ast
from collections.abc import Sequence
from pathlib import Path

from workflow_rl.errors import UserError

PLACE = "{text_prompt}"


def read_template(file: str | Path, names: Sequence[str], tokens: Sequence[str]) -> str:
    """The template in a text file, or in string constants of a Python file, which is not run.

    Parameters
    ----------
    names : sequence of str
        Constants of a Python file whose texts, one after the other, are the template.
    tokens : sequence of str
        Each must be there once, in this order; and ``{text_prompt}`` once.

    Raises
    ------
    UserError
        The file cannot be read or holds something else.
    """
    path = Path(file).expanduser()
    try:
        text = path.read_text(encoding="utf-8")
        template = _constants(text, names) if path.suffix == ".py" else text
    except (OSError, UnicodeDecodeError, SyntaxError) as error:
        raise UserError(f"template {file} cannot be read: {error}") from error
    except KeyError as error:
        raise UserError(
            f"template {file} has no text called {error}: name the published file"
        ) from error
    places = [template.find(token) for token in tokens]
    if template.count(PLACE) != 1 or any(template.count(token) != 1 for token in tokens):
        raise UserError(f"template {file} must hold each of {PLACE}, {', '.join(tokens)} once")
    if places != sorted(places):
        raise UserError(f"template {file} must hold {', '.join(tokens)} in this order")
    return template


def _constants(source: str, names: Sequence[str]) -> str:
    """String constants of a Python module, joined."""
    found = {
        target.id: node.value.value
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name) and isinstance(node.value.value, str)
    }
    return "".join(found[name] for name in names)
