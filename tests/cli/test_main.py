"""Every command teaches, and answers quickly because it imports only what it needs."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Invoke
from workflow_rl import __version__
from workflow_rl.errors import WorkflowRLError

HEAVY = ("torch", "diffusers", "transformers", "numpy", "av", "PIL")
COMMANDS = [
    *("init", "train", "resume", "generate", "evaluate", "ablate", "report", "reward-server"),
    *("export", "kernels", "plan", "pretrain-tiny"),
]


def _run_in_new_process(*arguments: str, cwd: Path | None = None) -> tuple[int, str, list[str]]:
    """Return exit code, stderr without the last line, and the heavy modules that were imported."""
    code = (
        "import atexit, sys\n"
        f"atexit.register(lambda: print([m for m in {HEAVY} if m in sys.modules], "
        "file=sys.stderr))\n"
        "from workflow_rl.cli.main import main\n"
        "main()\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    *errors, imported = result.stderr.splitlines()
    return result.returncode, "\n".join(errors), eval(imported)


def test_version(invoke: Invoke) -> None:
    assert invoke("--version").stdout == f"workflow-rl {__version__}\n"


def test_help_lists_every_command(invoke: Invoke) -> None:
    text = invoke("--help").stdout
    assert [name for name in COMMANDS if name not in text] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_shows_how_to_call_it(invoke: Invoke, command: str) -> None:
    assert f"workflow-rl {command}" in invoke(command, "--help").stdout.split("Example", 1)[1]


def test_kernels_are_listed(invoke: Invoke) -> None:
    text = invoke("kernels").stdout
    assert "torch_eager" in text
    assert "numpy_reference" in text


@pytest.mark.parametrize(
    ("arguments", "exit_code"),
    [
        (("--help",), 0),
        (("--version",), 0),
        (("train", "--help"), 0),
        (("train", "run.yaml", "lr=1"), 2),
        (("train", "run.yaml", "stages.t2i.model=nowhere"), 2),
        (("train", "run.yaml", "data.prompts=none.txt"), 2),
        (("train", "run.yaml", "rewards.0.name=none"), 2),
        (("train", "run.yaml", "output_dir=flux"), 2),
        (("ablate", "--help"), 0),
        (("ablate", "run.yaml", "--dry-run"), 0),
        (("ablate", "run.yaml", "--only", "none"), 2),
        (("ablate", "run.yaml", "data.prompts=none.txt"), 2),
        (("generate", "--prompt", "x", "--t2i", "nowhere"), 2),
        (("report", "nowhere"), 2),
        (("export", "nowhere", "--stage", "i2v", "--format", "lora"), 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_answers_without_importing_what_is_heavy(
    workspace: Path, arguments: tuple[str, ...], exit_code: int
) -> None:
    code, errors, imported = _run_in_new_process(*arguments, cwd=workspace)
    assert (code, imported) == (exit_code, [])
    assert errors.startswith("error: ") if exit_code else errors == ""


def test_fault_of_ours_keeps_its_traceback(
    invoke: Invoke, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr("workflow_rl.cli.train.check_inputs", fail)
    with pytest.raises(RuntimeError, match="a defect"):
        invoke("train", "run.yaml")


def test_a_stop_on_purpose_is_one_line_and_exit_code_1(
    invoke: Invoke, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise WorkflowRLError("stage 't2i': 10 updates in a row\nwere not finite")

    monkeypatch.setattr("workflow_rl.cli.train.check_inputs", stop)
    result = invoke("train", "run.yaml")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "error: stage 't2i': 10 updates in a row were not finite\n"


def test_no_command_tells_to_install_torchvision(
    invoke: Invoke, caplog: pytest.LogCaptureFixture
) -> None:
    invoke("kernels")
    imports = logging.getLogger("transformers.utils.import_utils")
    imports.warning("`CLIPImageProcessor` requires torchvision (not installed); falling back")
    imports.warning("`T5Tokenizer` requires sentencepiece")
    assert [record.getMessage() for record in caplog.records] == [
        "`T5Tokenizer` requires sentencepiece"
    ]
