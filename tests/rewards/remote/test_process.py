"""A reward in a process of its own: the same scores, and no crash of it ends the run.

Each start imports PyTorch, so one process serves as many tests as it can.
"""

import os
import signal
import sys
import sysconfig
import time
import venv
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import workflow_rl
from tests.rewards.remote import rewards_for_processes
from tests.rewards.remote.conftest import Videos
from tests.rewards.remote.faulty_server import mean_of
from workflow_rl.errors import UserError
from workflow_rl.rewards.base import RewardBatch, score_safely
from workflow_rl.rewards.pending import PendingScores
from workflow_rl.rewards.remote.process import ProcessReward

ENTRY = {"callable": f"{rewards_for_processes.__name__}:moody"}


@pytest.fixture(scope="module")
def reward(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessReward]:
    """A reward with an interpreter and an environment of its own."""
    python = tmp_path_factory.mktemp("venv") / "python"
    python.write_text(f'#!/bin/sh\nREWARD_TEST=$((REWARD_TEST + 1)) exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    made = ProcessReward(
        ENTRY, name="moody", media_kind="any", python=python, env={"REWARD_TEST": "6"}
    )
    yield made
    made.close()


def _saying(batch: RewardBatch, **prompts: str) -> RewardBatch:
    """The batch with the prompts of samples ``s17`` and so on replaced."""
    told = zip(batch.sample_ids, batch.prompts, strict=True)
    return replace(batch, prompts=[prompts.get(name, prompt) for name, prompt in told])


def _assert_scored(reward: ProcessReward, batch: RewardBatch, failed: Sequence[int] = ()) -> None:
    """Score, and see that all samples but the failed have their own scores."""
    result = score_safely(reward, batch)
    assert list(result.failures) == list(failed), result.failures
    kept = [row for row in range(len(batch)) if row not in failed]
    assert torch.equal(result.scores[kept], mean_of(batch.media)[kept])


def _pid(reward: ProcessReward) -> int:
    assert reward.pid is not None
    return reward.pid


def _ends(pid: int) -> bool:
    """Whether a process ends within ten seconds; one that only waits to be reaped has ended."""
    status = Path(f"/proc/{pid}/stat")
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.05)
    return False


def test_scores_are_those_in_process(reward: ProcessReward, videos: Videos) -> None:
    _assert_scored(reward, videos(19))
    assert _pid(reward) != os.getpid()


def test_it_has_its_own_environment_and_interpreter(reward: ProcessReward, videos: Videos) -> None:
    result = score_safely(reward, _saying(videos(1), s0="environment"))
    assert result.scores.tolist() == [7.0]


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """Return a virtual environment without any package."""
    venv.create(tmp_path / "reward", with_pip=False)
    return tmp_path / "reward"


def test_an_environment_without_workflow_rl_is_told_before_the_run(environment: Path) -> None:
    reward = ProcessReward(ENTRY, name="moody", media_kind="any", python=_python(environment))
    with pytest.raises(UserError, match="must be able to import workflow_rl, torch, numpy"):
        reward.load()


@pytest.mark.parametrize("text", ["hi", "welcome to this environment"])
def test_an_interpreter_that_prints_is_refused(tmp_path: Path, text: str) -> None:
    """What it printed would be read as the length of an answer."""
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\necho "{text}"\nexec {sys.executable} "$@"\n')
    program.chmod(0o755)
    reward = ProcessReward(ENTRY, name="moody", media_kind="any", python=program)
    with pytest.raises(UserError, match="printed something before it was ready"):
        reward.load()
    assert reward.pid is None


def test_a_package_of_its_own_virtual_environment_scores(environment: Path, videos: Videos) -> None:
    """The run cannot import what the reward is written in."""
    (packages,) = environment.glob("lib/python*/site-packages")
    root = Path(workflow_rl.__file__).parents[1]
    (packages / "shared.pth").write_text(f"{sysconfig.get_path('purelib')}\n{root}\n")
    (packages / "only_there.py").write_text(
        "import sys\n\n\ndef prefix(videos, prompts, sample_ids):\n"
        "    return [float(sys.prefix == prompts[0])]\n"
    )
    assert find_spec("only_there") is None
    reward = ProcessReward(
        {"callable": "only_there:prefix"},
        name="prefix",
        media_kind="any",
        python=_python(environment),
    )
    result = score_safely(reward, _saying(videos(1), s0=str(environment)))
    reward.close()
    assert result.failures == {}
    assert result.scores.tolist() == [1.0]


def _python(environment: Path) -> Path:
    return environment / "bin" / "python"


def test_one_sample_of_64_that_raises_fails_alone(reward: ProcessReward, videos: Videos) -> None:
    batch = _saying(videos(64), s17="raise")
    _assert_scored(reward, batch, failed=[17])
    assert score_safely(reward, batch).failures == {17: "RuntimeError: no face found"}


def test_answers_that_are_no_scores_fail_alone(reward: ProcessReward, videos: Videos) -> None:
    batch = _saying(videos(4), s0="nan", s1="text", s3="none")
    assert score_safely(reward, batch).failures == {
        0: "returned nan, not a finite float32",
        1: "returned str, not a number",
        3: "returned None for this sample: return a number to score it",
    }
    _assert_scored(reward, batch, failed=[0, 1, 3])


def test_scores_come_while_samples_are_made(reward: ProcessReward, videos: Videos) -> None:
    """What is whole is sent at once: nobody waits for the last sample."""
    reward.load()
    batch = videos(11)
    pending = PendingScores(reward)
    for row in range(9):
        pending.add(batch.row(row))
    ((_, future),) = pending._sent
    assert future.result(30).failures == {}
    for row in range(9, 11):
        pending.add(batch.row(row))
    assert torch.equal(pending.result(30).scores, mean_of(batch.media))


def test_a_process_that_was_killed_is_started_again(reward: ProcessReward, videos: Videos) -> None:
    reward.load()
    first = _pid(reward)
    os.kill(first, signal.SIGKILL)
    _assert_scored(reward, videos(9))
    assert _pid(reward) != first


def test_a_sample_that_kills_the_process_fails_alone(reward: ProcessReward, videos: Videos) -> None:
    batch = _saying(videos(2), s1="die")
    result = score_safely(reward, batch)
    assert result.failures == {1: "the process was killed by SIGSEGV"}
    assert torch.equal(result.scores[:1], mean_of(batch.media)[:1])


def test_a_process_that_hangs_is_killed_in_time(reward: ProcessReward, videos: Videos) -> None:
    reward.load()
    hung = _pid(reward)
    began = time.monotonic()
    result = score_safely(reward, _saying(videos(9), s0="hang"), timeout_s=0.5)
    assert time.monotonic() - began < 5
    assert set(result.failures.values()) == {"timed out after 0.5 s"}
    assert _ends(hung)


def test_a_process_that_keeps_dying_is_given_up(
    reward: ProcessReward, videos: Videos, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reward, "_restarts", 0)
    result = score_safely(reward, _saying(videos(9), s0="die"))
    cause = "the process was killed by SIGSEGV, and has had its 0 restarts"
    assert set(result.failures.values()) == {cause}
    assert reward.pid is None


@pytest.mark.parametrize(
    ("python", "env", "words"),
    [
        (None, {"REWARD_TEST": "unready"}, "in its own process: .*there is no licence"),
        ("/bin/false", {}, "ended with code 1 before it was ready"),
        ("/no/such/python", {}, "is no program"),
    ],
)
def test_a_process_that_cannot_serve_ends_the_run_before_it_begins(
    python: str | None, env: dict[str, str], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        ProcessReward(ENTRY, name="moody", media_kind="any", python=python, env=env).load()
