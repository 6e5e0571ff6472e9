"""A command line that cannot be read: one line like every other mistake, with exit code 2."""

from __future__ import annotations

import pytest

from tests.cli.conftest import Invoke


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("trian run.yaml", "'trian'. Did you mean 'train'?"),
        ("nothing", "'nothing' (see `workflow-rl --help`)"),
        ("--versoin", "workflow-rl has no option --versoin; did you mean --version?"),
        ("--version=3", "'--version' does not take a value"),
        ("train run.yaml --ovewrite", "workflow-rl train has no option --ovewrite; did you mean"),
        ("train run.yaml -x", "has no option -x; it has --dry-run, --overwrite, --help"),
        ("resume run --iterations 9", "has no option --iterations; it has --help"),
        ("train", "'CONFIG'; call it so: workflow-rl train [OPTIONS] {CONFIG} [KEY=VALUE]..."),
        ("generate", "'--prompt' / '-p' (see `workflow-rl generate --help`)"),
        ("report run another", "(another) (see `workflow-rl report --help`)"),
        ("evaluate run --prompts", "'--prompts' requires an argument (see `workflow-rl COMMAND"),
        ("evaluate run --seeds-per-prompt x", "'--seeds-per-prompt': Input should be a valid int"),
        ("evaluate run --seeds-per-prompt 0", "should be greater than or equal to 1 (see"),
        ("export run --stage i2v --format x", "is not one of 'lora', 'merged', 'diffusers' (see"),
    ],
)
def test_one_line(invoke: Invoke, arguments: str, says: str) -> None:
    assert says in invoke(*arguments.split()).one_line_error()


def test_no_arguments_show_the_help(invoke: Invoke) -> None:
    result = invoke()
    assert result.exit_code == 2
    assert "pretrain-tiny" in result.stdout + result.stderr
