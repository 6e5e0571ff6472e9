"""Reading a configuration: what is valid stays what it says, every slip is told in one line."""

from pathlib import Path

import pytest

from tests.config.conftest import LoadWith
from workflow_rl.config import check_first_frames, load_config, load_prompts
from workflow_rl.errors import UserError

CONFIGS = Path(__file__).parents[2] / "configs"

SLIPS = [
    # (override, what the line must say)
    ("stages.t2i.sampels=3", ["unknown key 'stages.t2i.sampels'", "'stages.t2i.samples'?"]),
    ("stages.t2i.lrr=1", ["unknown key 'stages.t2i.lrr'", "'stages.t2i.optimizer.lr'?"]),
    ("lr=1", ["unknown key 'lr'", "'stages.t2i.optimizer.lr'?"]),
    ("stages.i2v.sde.windo={}", ["'stages.i2v.sde.windo'", "'stages.i2v.sde.window'?"]),
    ("rewards.0.weigth=1", ["'rewards.0.weigth'", "'rewards.0.weight'?"]),
    ("qqqq=1", ["unknown key 'qqqq'", "valid here: seed, output_dir"]),
    ("iterations=5", ["unknown key 'iterations'; did you mean 'training.iterations'?"]),
    ("batch_size=5", ["unknown key 'batch_size'; did you mean 'evaluation.batch_size'?"]),
    ("stages.t2i.lr=1", ["did you mean 'stages.t2i.optimizer.lr'?"]),
    ("rewards=frame_change", ["'rewards' is \"frame_change\" (a string); expected a list"]),
    ("stages.t2i.lora.targets=to_q", ["'stages.t2i.lora.targets' is \"to_q\"; expected 'all-"]),
    ("stages.t2i.optimizer.lr=null", ["'stages.t2i.optimizer.lr' is null; expected"]),
    ("stages.t2i.samples=four", ["'stages.t2i.samples' is \"four\" (a string)", "integer"]),
    ("stages.t2i.samples=2.5", ["'stages.t2i.samples' is 2.5", "integer"]),
    ("stages.t2i.samples='4'", ['"4" (a string)', "integer"]),
    ("stages.t2i.freeze=1", ["'stages.t2i.freeze' is 1 (an integer)", "true or false"]),
    ("stages.t2i.optimizer.lr=fast", ["'stages.t2i.optimizer.lr' is \"fast\"", "number"]),
    ("stages.t2i.optimizer.lr=.inf", ["'stages.t2i.optimizer.lr' is \".inf\"", "number"]),
    ("stages.t2i.optimizer.lr=1e999", ["'stages.t2i.optimizer.lr'", "finite"]),
    ("stages.t2i.optimizer.betas=[0.9]", ["'stages.t2i.optimizer.betas.1' is missing"]),
    ("stages.t2i.optimizer.betas=[0.9, 1.0]", ["stages.t2i.optimizer: betas", "[0, 1)"]),
    ("data=7", ["'data' is 7 (an integer)", "mapping"]),
    ("data={}", ["'data.prompts' is missing", "training prompts"]),
    ("rewards=[]", ["'rewards' is []", "give 1 or more"]),
    ("stages={}", ["'stages' is {}", "give 1 or more"]),
    ("training.iterations=0", ["'training.iterations' is 0", "greater than or equal to 1"]),
    ("credit.rule=nestd", ["'credit.rule' is \"nestd\"", "did you mean 'nested'?"]),
    ("credit.rule=zzz", ["'credit.rule' is \"zzz\"", "'shared' or 'nested'"]),
    ("stages.i2v.samples=1", ["stages.i2v.samples is 1", "nested", "credit.rule: shared"]),
    ("stages.t2i.samples=1", ["stages.t2i.samples is 1", "at least 2"]),
    ("stages.i2v.task=t2i", ["stage 'i2v' (t2i) comes after stage 't2i'", "put it first"]),
    ("stages.t2i.num_frames=9", ["stages.t2i: num_frames is 9", "makes images"]),
    ("stages.t2i.height=32", ["stages.t2i: give height and width together"]),
    ("stages.t2i.num_inference_steps=1", ["num_inference_steps is 1", "at least 2"]),
    ("stages.t2i.sde.kind=ode", ["sde.kind is 'ode'", "freeze the stage"]),
    ("stages.t2i.sde={kind: cps, noise_scale: 2}", ["noise_scale is 2.0", "at most 1"]),
    ("stages.t2i.sde.window.mode=fixed", ["mode 'fixed' needs a size"]),
    ("stages.t2i.sde.window.size=3", ["mode 'all' takes no start or size"]),
    (
        "stages.t2i.sde.window={mode: fixed, start: 3, size: 3}",
        ["stages.t2i: sde.window covers steps 3 to 5", "only 0 to 4"],
    ),
    ("rewards.0.on=foo", ["rewards.0.on is 'foo'", "t2i, i2v"]),
    ("rewards.0.callable=a:b", ["rewards.0: give either name", "or callable"]),
    ("rewards.0.name=null", ["rewards.0: give either name", "or callable"]),
    ("evaluation.weights=ema", ["evaluation.weights is 'ema'", "stages.t2i.ema.decay"]),
    ("stages.T2I={task: t2i}", ["stage name 'T2I'", "lower-case"]),
    ("output_dir.x=1", ["override 'output_dir.x=1'", "has no keys below it"]),
    ("rewards.4.weight=1", ["override 'rewards.4.weight=1'", "from 0 to 0"]),
    ("seed", ["override 'seed' is not key.sub=value"]),
    ("=3", ["override '=3' is not key.sub=value"]),
    ("foo[0]=1", ["unknown key 'foo[0]'; valid here: seed"]),
    ("stages.t2i.lora[0]=1", ["unknown key 'stages.t2i.lora[0]'; did you mean 'stages.t2i.lora'?"]),
    ("stages.t2i.memory.embedding_cache=3.5", ["memory.embedding_cache' is 3.5 (a number); exp"]),
    ("stages.t2i.lora.targets=[1]", ["'stages.t2i.lora.targets' is [1]"]),
    ("a..b=3", ["override 'a..b=3' is not key.sub=value"]),
    ("seed=[1", ["override 'seed=[1': the value is not YAML"]),
]


@pytest.mark.parametrize(("override", "says"), SLIPS, ids=[slip[0] for slip in SLIPS])
def test_slip_is_told_in_one_line(load_with: LoadWith, override: str, says: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        load_with(override)
    message = str(caught.value)
    assert "\n" not in message
    for part in says:
        assert part in message


def test_unknown_key_comes_first_and_others_are_counted(load_with: LoadWith) -> None:
    with pytest.raises(UserError, match=r"unknown key 'stages.i2v.sampls'.*\(and 1 more\)"):
        load_with("seed=x", "stages.i2v.sampls=3")


def test_every_stage_frozen_is_refused(load_with: LoadWith) -> None:
    with pytest.raises(UserError, match="nothing trains; unfreeze one"):
        load_with("stages.t2i.freeze=true", "stages.i2v.freeze=true")


def test_shared_credit_needs_something_to_compare(load_with: LoadWith) -> None:
    single = ("stages.t2i.samples=1", "credit.rule=shared")
    assert load_with(*single).stages["i2v"].samples == 4
    with pytest.raises(UserError, match="nothing to compare"):
        load_with(*single, "stages.i2v.samples=1")


def test_frozen_stage_is_free_of_what_training_needs(load_with: LoadWith) -> None:
    config = load_with(
        "stages.t2i.freeze=true",
        "stages.t2i.samples=1",
        "stages.t2i.sde.kind=ode",
        "stages.t2i.num_inference_steps=1",
    )
    assert config.stages["t2i"].freeze


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "holds nothing"),
        (b"- 1\n", "holds a list"),
        (b"a: [1\n", "line 2"),
        (b"seed: 1\nseed: 2\n", "line 2: key 'seed' is given twice"),
        (b"1: 2\n", "line 1: key 1 is not a string"),
        (b"seed: \xff\n", "byte 6 is not UTF-8"),
        (b"seed: \x00\n", "not YAML"),
        (b"seed: !!python/object/apply:os.getcwd []\n", "line 1"),
        (b"seed: 1\noutput_dir: !!binary aGk=\n", "line 2: could not determine a constructor"),
        (b"seed: !!timestamp 2026-01-01\n", "line 1: could not determine a constructor"),
    ],
)
def test_file_that_is_no_configuration(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        load_config(path)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        load_config(tmp_path / "none.yaml")


def test_overrides_reach_nested_keys_and_lists(load_with: LoadWith) -> None:
    config = load_with(
        "stages.t2i.optimizer.lr=1e-6",
        "stages.i2v.ema.decay=0.9",
        "rewards.0.args={threshold: 0.5, on: [yes, no]}",
        "logging.wandb={project: p}",
        "seed=7",
    )
    assert config.stages["t2i"].optimizer.lr == 1e-6
    assert config.stages["i2v"].ema.decay == 0.9
    assert config.rewards[0].args == {"threshold": 0.5, "on": ["yes", "no"]}
    assert config.logging.wandb is not None
    assert config.logging.wandb.project == "p"
    assert config.seed == 7
    assert list(config.stages) == ["t2i", "i2v"]


@pytest.mark.parametrize("name", sorted(path.name for path in CONFIGS.glob("*.yaml")))
def test_shipped_configurations_are_valid(name: str) -> None:
    config = load_config(CONFIGS / name)
    for path in (config.data.prompts, config.data.eval_prompts):
        if path is not None and path.parts[0] == CONFIGS.name:
            check_first_frames(
                path, load_prompts(CONFIGS.parent / path, list(config.stages)), config.stages
            )
