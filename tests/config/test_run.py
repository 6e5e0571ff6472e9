"""What holds for a whole configuration."""

import dataclasses
import sys
import typing
from pathlib import Path
from subprocess import run
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from tests.config.conftest import LoadWith
from workflow_rl.config import RunConfig, load_config
from workflow_rl.config.messages import _model_in
from workflow_rl.config.stage import SDEConfig, StageConfig
from workflow_rl.errors import UserError


def _models(model: type[BaseModel]) -> set[type[BaseModel]]:
    found = {model}
    for field in model.model_fields.values():
        below = _model_in(field.annotation)
        if below is not None:
            found |= _models(below)
    return found


def _choices(model: type[BaseModel], field: str) -> set[str]:
    return set(typing.get_args(model.model_fields[field].annotation))


def test_every_key_is_described() -> None:
    bare = [
        f"{model.__name__}.{name}"
        for model in _models(RunConfig)
        for name, field in model.model_fields.items()
        if not field.description
    ]
    assert bare == []
    assert StageConfig in _models(RunConfig)


def test_yaml_round_trip(load_with: LoadWith, tmp_path: Path) -> None:
    config = load_with(
        "workflow='1e-4'",
        "stages.t2i.negative_prompt='on'",
        "stages.t2i.guidance_scale=2",
        "stages.i2v.kernel='~'",
    )
    path = tmp_path / "dumped.yaml"
    path.write_text(config.dump_yaml(), encoding="utf-8")
    assert load_config(path) == config


@pytest.mark.parametrize(
    "override",
    [
        *("output_dir=elsewhere", "logging.tensorboard=false", "logging.wandb={project: p}"),
        "training.max_unscored_iterations=9",
    ],
)
def test_fingerprint_ignores_what_gives_no_numbers(load_with: LoadWith, override: str) -> None:
    assert load_with(override).fingerprint() == load_with().fingerprint()


@pytest.mark.parametrize(
    "override",
    ["seed=1", "stages.t2i.optimizer.lr=2e-4", "rewards.0.weight=2", "training.iterations=7"],
)
def test_fingerprint_sees_what_decides_the_numbers(load_with: LoadWith, override: str) -> None:
    assert load_with(override).fingerprint() != load_with().fingerprint()


SERVED = "{url: 'http://a:1', batch_size: 2}"


@pytest.mark.parametrize(
    ("server", "same"),
    [
        ("{url: 'http://b:2', batch_size: 2, wait_s: 9, retries: 0, in_flight: 1}", True),
        ("{url: 'http://a:1', batch_size: 2, request_timeout_s: 5}", True),
        ("{url: 'http://a:1', batch_size: 3}", False),
        ("{url: 'http://a:1', batch_size: 2, media: float32}", False),
        ("{url: 'http://a:1', batch_size: 2, reward: other}", False),
        ("null", False),
    ],
)
@pytest.mark.parametrize("index", [0, 1])
def test_fingerprint_ignores_where_and_how_a_server_is_asked(
    load_with: LoadWith, server: str, same: bool, index: int
) -> None:
    def of(*servers: str) -> str:
        terms = ", ".join(f"{{name: motion_amount, server: {text}}}" for text in servers)
        return load_with(f"rewards=[{terms}]").fingerprint()

    servers = [SERVED, SERVED]
    servers[index] = server
    assert (of(*servers) == of(SERVED, SERVED)) is same


def test_fingerprint_sees_the_order_of_stages(load_with: LoadWith) -> None:
    extra = "{task: i2v, samples: 2}"
    one = load_with(f"stages.a={extra}", "stages.b={task: i2v, samples: 3}")
    other = load_with("stages.b={task: i2v, samples: 3}", f"stages.a={extra}")
    assert one.stages == other.stages  # equal as mappings, yet another chain
    assert one.fingerprint() != other.fingerprint()


def test_fingerprint_is_the_same_in_another_process(config_file: Path) -> None:
    code = "import sys; from workflow_rl.config import load_config as f; "
    code += "print(f(sys.argv[1]).fingerprint(), 'torch' in sys.modules)"
    result = run(
        [sys.executable, "-c", code, str(config_file)], capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == [load_config(config_file).fingerprint(), "False"]


def test_configuration_is_frozen(load_with: LoadWith) -> None:
    config: Any = load_with()
    with pytest.raises(ValidationError):
        config.seed = 3


def test_training_batch_is_the_rollout_batch_unless_given(load_with: LoadWith) -> None:
    config = load_with("stages.t2i.rollout_batch_size=6", "stages.i2v.micro_batch_size=2")
    assert config.stages["t2i"].training_batch_size == 6
    assert config.stages["i2v"].training_batch_size == 2


def test_choices_are_those_of_the_code_they_choose_from() -> None:
    from workflow_rl.config.run import CreditConfig
    from workflow_rl.config.stage import WindowConfig
    from workflow_rl.loop.sde import SDE_KINDS
    from workflow_rl.loop.window import WINDOW_STARTS, SDEWindow
    from workflow_rl.training.credit import CREDIT_RULES
    from workflow_rl.training.objective import STEP_WEIGHTINGS

    assert _choices(SDEConfig, "kind") == set(SDE_KINDS)
    assert _choices(StageConfig, "step_weighting") == set(STEP_WEIGHTINGS)
    assert _choices(CreditConfig, "rule") == set(CREDIT_RULES)
    assert _choices(WindowConfig, "mode") == set(WINDOW_STARTS)
    assert set(WindowConfig.model_fields) == {f.name for f in dataclasses.fields(SDEWindow)}


def test_reward_keys_are_those_of_the_registry() -> None:
    from workflow_rl.config import RewardConfig
    from workflow_rl.rewards.registry import RewardSpec

    assert set(RewardConfig.model_fields) == {f.name for f in dataclasses.fields(RewardSpec)}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("stages={image: {task: i2v}}", "cannot be called 'image', which is a key of prompt files"),
        ("stages={prompt: {task: t2i}}", "cannot be called 'prompt'"),
        ("stages={a: {task: i2v}, b: {task: t2i}}", "stage 'b' .t2i. comes after stage 'a'"),
        ("stages={t2i: {task: t2i, samples: 1}}", "stages.t2i.samples is 1, but credit.rule"),
    ],
)
def test_what_would_fail_later_is_refused(load_with: LoadWith, override: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_with(override)


@pytest.mark.parametrize(
    "stages",
    [
        "{t2i: {task: t2i}}",
        "{clip: {task: i2v}}",
        "{image: {task: t2i}, shot1: {task: i2v}, shot2: {task: i2v}}",
    ],
)
def test_a_chain_may_have_any_length_and_begin_with_images(
    load_with: LoadWith, stages: str
) -> None:
    assert len(load_with(f"stages={stages}").stages) == stages.count("task")
