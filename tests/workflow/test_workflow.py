"""Workflows are checked when they are registered."""

from dataclasses import replace
from pathlib import Path

import pytest

from workflow_rl.card import ModelCard
from workflow_rl.errors import UserError
from workflow_rl.request import TaskType
from workflow_rl.workflow import T2I_I2V, Catalog, Workflow, WorkflowStage


def _card(model_id: str, task: TaskType) -> ModelCard:
    return ModelCard(
        model_id=model_id,
        family="none",
        task=task,
        source=Path("nowhere"),
        components=("transformer",),
        make_adapter=lambda card, device, dtype: None,
    )


@pytest.fixture
def catalog() -> Catalog:
    catalog = Catalog()
    catalog.register_model(_card("painter", TaskType.T2I))
    catalog.register_model(_card("animator", TaskType.I2V))
    return catalog


MODELS = {"t2i": "painter", "i2v": "animator"}


def test_a_workflow_is_served_under_its_id(catalog: Catalog) -> None:
    catalog.register_workflow(T2I_I2V, MODELS)
    assert catalog.ids == ("painter", "animator", "image_video.t2i_i2v")
    assert catalog.workflow("image_video.t2i_i2v") is T2I_I2V
    cards = catalog.cards_of("image_video.t2i_i2v")
    assert [card.model_id for card in cards.values()] == ["painter", "animator"]


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ({"t2i": "painter"}, "'i2v' of image_video.t2i_i2v has no model"),
        (MODELS | {"i2v": "absent"}, "'absent', which is not registered"),
        (MODELS | {"i2v": "painter"}, "needs a i2v model, but painter is a t2i model"),
        (MODELS | {"extra": "painter"}, "has no stage 'extra'"),
    ],
)
def test_a_wrong_binding_is_refused(catalog: Catalog, models: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        catalog.register_workflow(T2I_I2V, models)
    assert "image_video.t2i_i2v" not in catalog.ids


def test_an_id_is_taken_once(catalog: Catalog) -> None:
    with pytest.raises(UserError, match="'painter' is already taken by a model"):
        catalog.register_model(_card("painter", TaskType.T2I))
    with pytest.raises(UserError, match="'painter' is already taken by a model"):
        catalog.register_workflow(replace(T2I_I2V, workflow_id="painter"), MODELS)
    catalog.register_workflow(T2I_I2V, MODELS)
    with pytest.raises(UserError, match="already taken by a workflow"):
        catalog.register_workflow(T2I_I2V, MODELS)


def test_a_loop_that_the_model_lacks_is_refused(catalog: Catalog) -> None:
    stage = replace(T2I_I2V.stages[0], loop_id="autoregressive")
    workflow = Workflow("other", (stage, T2I_I2V.stages[1]))
    with pytest.raises(UserError, match="'autoregressive'; painter lacks it"):
        catalog.register_workflow(workflow, MODELS)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ((), "has no stages"),
        ((WorkflowStage("a", TaskType.T2I),) * 2, "two stages called 'a'"),
        (
            (WorkflowStage("i2v", TaskType.I2V), WorkflowStage("t2i", TaskType.T2I)),
            "takes no image from 'i2v'",
        ),
    ],
)
def test_a_chain_that_cannot_be_threaded_is_refused(
    catalog: Catalog, stages: tuple[WorkflowStage, ...], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        catalog.register_workflow(Workflow("broken", stages), {})
