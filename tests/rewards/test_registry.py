"""A reward named in a configuration is built, or refused in one line that tells the mend."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from workflow_rl.errors import UserError
from workflow_rl.rewards.base import RewardBatch, score_safely
from workflow_rl.rewards.python_callable import PythonCallable
from workflow_rl.rewards.registry import REWARDS, RewardSpec, build_reward, build_rewards

HERE = "tests.rewards.test_registry"
NOT_A_FUNCTION = 3


def length(videos: Tensor, prompts: Sequence[str], sample_ids: Sequence[str]) -> list[float]:
    """Length of the prompt."""
    return [float(len(prompt)) for prompt in prompts]


def two_parts(
    videos: Tensor, prompts: Sequence[str], sample_ids: Sequence[str], factor: float = 1.0
) -> dict[str, Tensor]:
    """Brightness and number of the sample."""
    numbers = torch.arange(len(sample_ids), dtype=torch.float32)
    return {"bright": videos.flatten(1).mean(1) * factor, "number": numbers}


class Holder:
    """A place for a function."""

    @staticmethod
    def length(videos: Tensor, prompts: Sequence[str], sample_ids: Sequence[str]) -> list[float]:
        """Length of the prompt."""
        return length(videos, prompts, sample_ids)


@pytest.fixture
def batch() -> RewardBatch:
    return RewardBatch(["a", "bcd"], ["0", "1"], torch.ones(2, 3, 2, 4, 4), "video")


@pytest.mark.parametrize("path", [f"{HERE}:length", f"{HERE}.length", f"{HERE}:Holder.length"])
def test_a_function_is_found_by_its_dotted_path(path: str, batch: RewardBatch) -> None:
    term = build_reward({"callable": path, "weight": 2.0, "on": "t2i", "timeout_s": 5})
    assert score_safely(term.reward, batch).scores.tolist() == [1.0, 3.0]
    assert (term.weight, term.on, term.timeout_s) == (2.0, "t2i", 5)
    assert term.reward.name == path.replace(":", ".")


def test_a_function_may_return_parts_and_take_arguments(batch: RewardBatch) -> None:
    term = build_reward(RewardSpec(callable=f"{HERE}:two_parts", args={"factor": 3.0}))
    result = score_safely(term.reward, batch)
    assert result.scores.tolist() == [3.0, 4.0]
    assert result.components["bright"].tolist() == [3.0, 3.0]


def test_a_module_in_the_working_directory_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: RewardBatch
) -> None:
    code = "def fn(videos, prompts, sample_ids):\n    return [1.0] * len(videos)\n"
    (tmp_path / "reward_beside_the_config.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    assert score_safely(PythonCallable("reward_beside_the_config:fn"), batch).scores.sum() == 2


@pytest.mark.parametrize("name", sorted(REWARDS))
def test_every_registered_reward_can_be_built(name: str) -> None:
    assert build_reward({"name": name}).reward.name == name


def test_a_list_of_entries_is_a_weighted_sum() -> None:
    composite = build_rewards([{"name": "directed_motion"}, {"name": "constant", "weight": 0.0}])
    assert composite.labels == ["directed_motion", "constant"]


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"name": "directed_moton"}, "did you mean 'directed_motion'"),
        ({"name": "constant", "wieght": 1.0}, "did you mean 'weight'"),
        ({"name": "constant", "args": {"valeu": 1.0}}, "'valeu'; it takes"),
        ({"weight": 1.0}, "either a name or a callable"),
        ({"name": "constant", "callable": f"{HERE}:length"}, "either a name or a callable"),
        ({"name": "constant", "weight": float("nan")}, "finite"),
        ({"name": "constant", "timeout_s": 0}, "seconds above 0"),
        ({"callable": "no_such_package.rewards:fn"}, "No module named 'no_such_package'"),
        ({"callable": f"{HERE}:no_such_function"}, "has no 'no_such_function'"),
        ({"callable": f"{HERE}:NOT_A_FUNCTION"}, "is a value of int"),
        ({"callable": "fractions.Fraction"}, "'fractions.Fraction' is a class: name a function"),
        ({"callable": "length"}, "names no module: write module:function"),
        ({"callable": "length"}, "a reward of this project is given by name"),
        ({"callable": ":length"}, "names no module"),
        ({"callable": "rewards:"}, "names no function"),
        ({"callable": "sharpness"}, "write name: sharpness, or module:function"),
        ({"callable": "sharpness", "process": {}}, "write name: sharpness"),
        ({"callable": "mine/rewards.py:fn"}, "names a file: write its module, as in rewards:fn"),
        ({"callable": "rewards.py:fn"}, "as in rewards:fn, and put its folder on PYTHONPATH"),
        ({"callable": "./rewards:fn"}, "as in rewards:fn"),
        ({"callable": f"{HERE}:length", "args": {"factor": 2}}, "'factor'"),
        ({"callable": "math:floor"}, "cannot be called"),
        ({"name": "ocr", "args": {"frames": 3}}, "cannot be made with args {'frames': 3} (TypeErr"),
        ({"name": "vlm_judge", "args": {"extra_body": [1]}}, "class in workflow_rl.rewards.vlm_ju"),
    ],
)
def test_what_cannot_be_built_is_refused_in_one_line(
    entry: Mapping[str, object], words: str
) -> None:
    with pytest.raises(UserError) as caught:
        build_reward(entry)
    assert words in str(caught.value)


def test_a_module_that_breaks_on_import_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "reward_that_breaks.py").write_text("raise ValueError('first\\nsecond')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match="ValueError: first second"):
        build_reward({"callable": "reward_that_breaks:fn"})


def test_a_wrong_name_is_told_without_loading_torch() -> None:
    code = (
        "import sys\n"
        "from workflow_rl.errors import UserError\n"
        "from workflow_rl.rewards.registry import build_reward\n"
        "try:\n    build_reward({'name': 'x'})\n"
        "except UserError:\n    sys.exit('torch' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_building_a_reward_imports_none_of_the_large_packages() -> None:
    """They are imported by the first score, so that a check of a configuration stays cheap."""
    code = (
        "import sys\n"
        "from workflow_rl.rewards.registry import REWARDS, build_reward\n"
        "large = ('transformers', 'diffusers', 'cv2', 'openai', 'onnxruntime')\n"
        "for name in sorted(REWARDS):\n"
        "    build_reward({'name': name})\n"
        "    for module in large:\n"
        "        if module in sys.modules:\n"
        "            sys.exit(f'{name} imports {module}')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
