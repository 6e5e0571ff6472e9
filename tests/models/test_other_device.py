"""Every family on a device beside the CPU: nothing is mixed, and the numbers are the same."""

from __future__ import annotations

import pytest
import torch

from tests.models.case import FamilyCase, roll_out, stage_policy, update
from tests.models.contract import family_cases
from tests.other_device import other_device
from workflow_rl.card import ModelCard
from workflow_rl.enums import ExecutionProfile
from workflow_rl.instance import load_card
from workflow_rl.models import build_card
from workflow_rl.request import TaskType
from workflow_rl.training.rollout import rollout_loop

CASES = family_cases()


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> FamilyCase:
    return CASES[request.param]


@pytest.fixture(scope="module")
def card(case: FamilyCase, tmp_path_factory: pytest.TempPathFactory) -> ModelCard:
    folder = tmp_path_factory.mktemp("other_device") / case.name
    case.save(folder)
    return build_card(folder, TaskType(case.task))


def test_it_serves_the_same(case: FamilyCase, card: ModelCard) -> None:
    requests = case.requests(**case.guidances[-1])

    def serve(device: torch.device | str) -> torch.Tensor:
        instance = load_card(card, device=device)
        media, _ = rollout_loop(instance, "denoise", requests, profile=ExecutionProfile.SERVE)
        return torch.stack([sample.cpu() for sample in media])

    with other_device() as device:
        there = serve(device)
    assert torch.allclose(there, serve("cpu"), atol=1e-5, rtol=0)


def test_it_trains_the_same(case: FamilyCase, card: ModelCard) -> None:
    """Rollout, reference, gradients, the optimiser's step and averaged weights."""

    def train(device: torch.device) -> list[dict[str, float]]:
        student, reference = (load_card(card, device=device) for _ in range(2))
        policy = stage_policy(student, case, reference=reference, kl_weight=0.1, ema_decay=0.5)
        done = [update(policy, roll_out(student, case)) for _ in range(2)]
        assert policy.ema is not None
        held = [*policy.masters.values(), *policy.ema.average.values()]
        assert {tensor.device for tensor in held} == {device}
        return [made.metrics for made in done]

    with other_device() as device:
        there = train(device)
    here = train(torch.device("cpu"))
    assert there == [pytest.approx(metrics, rel=1e-4, abs=1e-7) for metrics in here]
    assert here[1][f"kl/{case.task}"] > 0
