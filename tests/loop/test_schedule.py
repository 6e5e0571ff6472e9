"""Our schedules are the stock scheduler's."""

import json
from typing import Any

import pytest
import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    FlowMatchHeunDiscreteScheduler,
    UniPCMultistepScheduler,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from workflow_rl.errors import UserError
from workflow_rl.loop.schedule import (
    calculate_shift,
    checkpoint_scheduler,
    euler_sigmas,
    flow_match_sigmas,
    sigmas_from_scheduler_config,
)
from workflow_rl.models.common import ScheduleSpec, linear_sigmas

configs = st.fixed_dictionaries(
    {
        "shift": st.floats(0.5, 12.0),
        "use_dynamic_shifting": st.booleans(),
        "base_shift": st.floats(0.3, 0.9),
        "max_shift": st.floats(0.9, 2.5),
        "base_image_seq_len": st.integers(64, 1024),
        "max_image_seq_len": st.integers(2048, 8192),
        "shift_terminal": st.none() | st.floats(0.01, 0.2),
        "time_shift_type": st.sampled_from(["exponential", "linear"]),
        "num_train_timesteps": st.sampled_from([1000, 500]),
    }
)


@given(
    config=configs,
    num_steps=st.integers(2, 60),
    num_tokens=st.integers(16, 8192),
    explicit=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_equal_to_the_stock_scheduler(
    config: dict[str, Any], num_steps: int, num_tokens: int, explicit: bool
) -> None:
    stock = FlowMatchEulerDiscreteScheduler(**config)
    mu = None
    if config["use_dynamic_shifting"]:
        mu = calculate_shift(
            num_tokens,
            config["base_image_seq_len"],
            config["max_image_seq_len"],
            config["base_shift"],
            config["max_shift"],
        )
    sigmas = linear_sigmas(num_steps) if explicit else None
    if sigmas is not None:
        stock.set_timesteps(sigmas=list(sigmas), mu=mu)
    else:
        stock.set_timesteps(num_steps, mu=mu)
    ours = sigmas_from_scheduler_config(
        stock.config, num_steps, num_tokens=num_tokens, sigmas=sigmas
    )
    assert ours.dtype is torch.float32
    assert torch.equal(ours, stock.sigmas)


FLUX = {"use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 1.15, "shift": 3.0}
LTX = {
    "use_dynamic_shifting": True, "base_shift": 0.95, "max_shift": 2.05, "shift_terminal": 0.1,
    "base_image_seq_len": 1024, "max_image_seq_len": 4096,
}  # fmt: skip
QWEN = {
    "use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 0.9, "shift_terminal": 0.02,
    "base_image_seq_len": 256, "max_image_seq_len": 8192,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "num_steps", "how", "first", "last"),
    [
        (FLUX, 28, {"num_tokens": 4096}, (1, 0.98841, 0.97622), (0.19545, 0.10472)),
        (FLUX, 28, {"num_tokens": 1024}, (1, 0.98066, 0.96064), (0.12620, 0.06502)),
        ({"shift": 1.0}, 4, {}, (1, 0.75), (0.5, 0.25)),
        (FLUX, 4, {"mu": 2.29118}, (1, 0.96738, 0.90814), (0.76720,)),
        (FLUX, 4, {"mu": 2.03069}, (1, 0.95809, 0.88398), (0.71750,)),
        (LTX, 50, {"num_tokens": 7392}, (1, 0.99890, 0.99776), (0.33558, 0.1)),
        ({"shift": 3.0}, 8, {"num_tokens": 4096}, (1, 0.95455, 0.9), (0.5, 0.3)),
        ({"shift": 6.0}, 50, {"mu": 1.15}, (1, 0.99661, 0.99310), (0.2, 0.10909)),
        (FLUX, 50, {"mu": 2.02335}, (1, 0.99731, 0.99452), (0.23963, 0.13372)),
        (QWEN, 50, {"num_tokens": 4096}, (1, 0.98970, 0.97919), (0.05848, 0.02)),
        (QWEN, 10, {"num_tokens": 1024}, (1, 0.92897, 0.85148), (0.18330, 0.02)),
        ({"flow_shift": 3.0}, 1, {}, (1,), (1,)),
    ],
)
def test_known_schedules_with_explicit_sigmas(
    config: dict[str, Any],
    num_steps: int,
    how: dict[str, Any],
    first: tuple[float, ...],
    last: tuple[float, ...],
) -> None:
    sigmas = euler_sigmas(ScheduleSpec(config, sigmas=linear_sigmas(num_steps), **how), num_steps)
    assert len(sigmas) == num_steps + 1
    assert sigmas[: len(first)].tolist() == pytest.approx(first, abs=1e-5)
    assert sigmas[-1 - len(last) : -1].tolist() == pytest.approx(last, abs=1e-5)
    assert sigmas[-1] == 0


@pytest.mark.parametrize(
    ("num_steps", "first", "last"),
    [
        (28, (1, 0.98738, 0.97411), (0.11091, 0.00893)),
        (10, (1, 0.96013, 0.91335), (0.27805, 0.00893)),
    ],
)
def test_sd35_shifts_the_smallest_sigma_twice(
    num_steps: int, first: tuple[float, ...], last: tuple[float, ...]
) -> None:
    sigmas = euler_sigmas(ScheduleSpec({"shift": 3.0}), num_steps)
    assert sigmas[:3].tolist() == pytest.approx(first, abs=1e-5)
    assert sigmas[-3:-1].tolist() == pytest.approx(last, abs=1e-5)


@pytest.mark.parametrize(
    ("shift", "first", "timesteps", "last"),
    [
        (3.0, (1, 0.99153, 0.98278), [999, 991, 982], (0.13871, 0.07408)),
        (5.0, (1, 0.99490, 0.98959), [999, 994, 989], (0.21162, 0.11765)),
    ],
)
def test_the_schedule_of_wans_own_scheduler(
    shift: float, first: tuple[float, ...], timesteps: list[int], last: tuple[float, ...]
) -> None:
    stock = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift
    )
    spec = ScheduleSpec(stock.config)
    own = checkpoint_scheduler(stock, spec, 40, torch.device("cpu"))
    assert own is not stock
    assert stock.num_inference_steps is None, "the folder's scheduler is left as it was"
    assert own.sigmas[:3].tolist() == pytest.approx(first, abs=1e-5)
    assert own.sigmas[-3:-1].tolist() == pytest.approx(last, abs=1e-5)
    assert own.timesteps[:3].tolist() == timesteps


def test_a_scheduler_of_two_evaluations_per_step_is_refused() -> None:
    heun = FlowMatchHeunDiscreteScheduler()
    with pytest.raises(UserError, match="takes 7 evaluations for 4 steps"):
        checkpoint_scheduler(heun, ScheduleSpec(heun.config), 4, torch.device("cpu"))


def test_shift_vectors() -> None:
    assert calculate_shift(4096) == pytest.approx(1.15)
    assert calculate_shift(1024) == pytest.approx(0.63)
    assert calculate_shift(4096, 256, 8192, 0.5, 0.9) == pytest.approx(0.69355, abs=1e-5)


@given(num_steps=st.integers(1, 40), shift=st.floats(1.0, 12.0))
@settings(max_examples=40, deadline=None)
def test_sigmas_fall_from_one_to_zero(num_steps: int, shift: float) -> None:
    sigmas = flow_match_sigmas(num_steps, shift=shift)
    assert float(sigmas[0]) == pytest.approx(1.0, abs=1e-6)
    assert sigmas[-1] == 0
    assert (sigmas.diff() < 0).all()


def test_a_spacing_we_do_not_have_is_refused() -> None:
    config = json.loads('{"use_karras_sigmas": true, "shift": 3.0}')
    with pytest.raises(UserError, match="use_karras_sigmas"):
        sigmas_from_scheduler_config(config, 4)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one step"):
        flow_match_sigmas(0)
    with pytest.raises(ValueError, match="4 steps need 4 sigmas, got 2"):
        flow_match_sigmas(4, sigmas=[1.0, 0.5])
    with pytest.raises(ValueError, match="num_tokens or mu"):
        sigmas_from_scheduler_config(FLUX, 4)
