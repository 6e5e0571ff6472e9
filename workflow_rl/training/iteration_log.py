"""A file of JSON lines, one per iteration, that survives being killed."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from workflow_rl.errors import UserError, WorkflowRLError


class IterationLog:
    """Appends whole lines with growing ``iteration``; forgets what a resumed run has left behind.

    Keys are sorted and numbers read back exactly; numbers that are not finite become null.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._last: int | None = None

    def append(self, iteration: int, values: Mapping[str, Any]) -> None:
        """Write a line and force it to the disk.

        Raises
        ------
        ValueError
            ``values`` names an iteration of its own, or ``iteration`` is not past the last line's.
        WorkflowRLError
            The file ends in half a line, or the disk refuses.
        """
        self.append_all(iteration, [values])

    def append_all(self, iteration: int, lines: Sequence[Mapping[str, Any]]) -> None:
        """Write the lines of one iteration and force them to the disk; raises as :meth:`append`."""
        if any("iteration" in values for values in lines):
            raise ValueError("'iteration' is not a name of a value")
        if self._last is None:
            self._last = self._last_written()
        if iteration <= self._last:
            raise ValueError(f"iteration {iteration} after {self._last} in {self.path}")
        text = "".join(
            json.dumps(strict_json({**values, "iteration": iteration}), sort_keys=True) + "\n"
            for values in lines
        )
        try:
            with self.path.open("ab") as file:
                file.write(text.encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise WorkflowRLError(
                f"cannot write {self.path}: {error}; make room and resume"
            ) from error
        self._last = iteration

    def read(self) -> list[dict[str, Any]]:
        """Return the lines; the torn last line of a killed run is left out."""
        return [values for _, values in self._lines()]

    def truncate_after(self, iteration: int) -> None:
        """Drop lines of later iterations and a torn last line; the others keep their bytes.

        The file is replaced in one step.

        Raises
        ------
        UserError
            A line that is not the last one is damaged.
        """
        self._last = None
        if not self.path.exists():
            return
        kept = [raw for raw, values in self._lines() if values["iteration"] <= iteration]
        temporary = self.path.with_name(f".{self.path.name}.tmp")
        with temporary.open("wb") as file:
            file.write(b"".join(kept))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.path)

    def _last_written(self) -> int:
        """Return the iteration of the last line, -1 if there is none."""
        raw = self.path.read_bytes() if self.path.exists() else b""
        if raw and not raw.endswith(b"\n"):
            raise WorkflowRLError(f"{self.path} ends in half a line; truncate_after() first")
        lines = self._lines()
        return int(lines[-1][1]["iteration"]) if lines else -1

    def _lines(self) -> list[tuple[bytes, dict[str, Any]]]:
        """Return each whole line as its bytes and its values."""
        if not self.path.exists():
            return []
        whole = []
        *terminated, _torn = self.path.read_bytes().split(b"\n")  # a whole file ends in b"" here
        for number, raw in enumerate(terminated, start=1):
            try:
                values = json.loads(raw)
                iteration = values["iteration"]
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(
                    f"{self.path}, line {number} is damaged; "
                    "delete that line or use a new run directory"
                ) from error
            if not isinstance(iteration, int):
                raise UserError(
                    f"{self.path}, line {number}: iteration is {iteration!r}; delete that line"
                )
            whole.append((raw + b"\n", values))
        return whole


def strict_json(value: Any) -> Any:
    """Return a JSON value with null for each number that JSON has no word for."""
    if isinstance(value, Mapping):
        return {key: strict_json(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [strict_json(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
