"""The prompt schedule is a pure function of the iteration."""

import pytest

from workflow_rl.config import PromptRecord
from workflow_rl.errors import UserError
from workflow_rl.training.data import PromptSchedule

RECORDS = tuple(PromptRecord(f"prompt {i}") for i in range(7))


def test_a_pass_shows_each_prompt_once_and_no_batch_repeats() -> None:
    schedule = PromptSchedule(RECORDS, 3, seed=0)
    batches = [schedule.at(i) for i in range(6)]
    assert all(len({p.prompt for p in batch}) == 3 for batch in batches)
    first_pass = [p.prompt for batch in batches[:2] for p in batch]
    assert len(set(first_pass)) == 6
    assert first_pass != [p.prompt for batch in batches[2:4] for p in batch]


def test_any_iteration_can_be_asked_for_first() -> None:
    assert PromptSchedule(RECORDS, 2, 5).at(40) == PromptSchedule(RECORDS, 2, 5).at(40)
    orders = {tuple(p.prompt for p in PromptSchedule(RECORDS, 7, s).at(0)) for s in range(5)}
    assert len(orders) > 1


def test_a_batch_larger_than_the_data_is_refused() -> None:
    with pytest.raises(UserError, match="prompts_per_iteration is 8, but there are 7"):
        PromptSchedule(RECORDS, 8, seed=0)
