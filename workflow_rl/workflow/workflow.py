"""Workflows: declared chains of stages, checked when they are registered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from workflow_rl.card import ModelCard
from workflow_rl.errors import UserError
from workflow_rl.request import TaskType

TAKES_IMAGE = frozenset({TaskType.I2V})
"""Tasks that are conditioned on an image; the others start a chain."""


@dataclass(frozen=True)
class WorkflowStage:
    """One model of a chain.

    Parameters
    ----------
    name
        Name of the stage in configs, metrics and the noise identity.
    task
        What the stage does; the card bound to it must do the same.
    loop_id
        The loop that drives it.
    """

    name: str
    task: TaskType
    loop_id: str = "denoise"


@dataclass(frozen=True)
class Workflow:
    """A chain of stages. Each stage's output becomes the next stage's conditioning image."""

    workflow_id: str
    stages: tuple[WorkflowStage, ...]

    def stage(self, name: str) -> WorkflowStage:
        """Return the stage called ``name``."""
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise UserError(
            f"{self.workflow_id} has no stage {name!r}; it has {[s.name for s in self.stages]}"
        )


class Catalog:
    """What can be served, by id: models and workflows share one name space."""

    def __init__(self) -> None:
        self._cards: dict[str, ModelCard] = {}
        self._workflows: dict[str, Workflow] = {}
        self._bindings: dict[str, dict[str, str]] = {}

    @property
    def ids(self) -> tuple[str, ...]:
        """Every servable id."""
        return (*self._cards, *self._workflows)

    def register_model(self, card: ModelCard, model_id: str | None = None) -> None:
        """Make ``card`` servable under ``model_id`` (None: its own); raise a UserError if taken."""
        model_id = card.model_id if model_id is None else model_id
        self._check_free(model_id)
        self._cards[model_id] = card

    def register_workflow(self, workflow: Workflow, models: Mapping[str, str]) -> None:
        """Make ``workflow`` servable under its id.

        Parameters
        ----------
        workflow
            The declared chain.
        models
            Stage name to the id of a registered model.

        Raises
        ------
        UserError
            If the id is taken, the chain cannot be threaded, or a stage's card is missing, does
            another task or lacks the loop.
        """
        self._check_free(workflow.workflow_id)
        check_threading(workflow)
        for stage in workflow.stages:
            where = f"stage {stage.name!r} of {workflow.workflow_id}"
            model_id = models.get(stage.name)
            if model_id is None:
                raise UserError(f"{where} has no model; name one of {sorted(self._cards)}")
            card = self._cards.get(model_id)
            if card is None:
                raise UserError(
                    f"{where} names the model {model_id!r}, which is not registered; "
                    f"registered: {sorted(self._cards)}"
                )
            check_stage_card(workflow, stage, card)
        unknown = sorted(set(models) - {stage.name for stage in workflow.stages})
        if unknown:
            raise UserError(f"{workflow.workflow_id} has no stage {unknown[0]!r}")
        self._workflows[workflow.workflow_id] = workflow
        self._bindings[workflow.workflow_id] = dict(models)

    def workflow(self, workflow_id: str) -> Workflow:
        """Return a registered workflow."""
        if workflow_id not in self._workflows:
            raise UserError(
                f"there is no workflow {workflow_id!r}; registered: {sorted(self._workflows)}"
            )
        return self._workflows[workflow_id]

    def cards_of(self, workflow_id: str) -> Mapping[str, ModelCard]:
        """Return stage name to card of a registered workflow."""
        workflow = self.workflow(workflow_id)
        bound = self._bindings[workflow_id]
        return MappingProxyType(
            {stage.name: self._cards[bound[stage.name]] for stage in workflow.stages}
        )

    def _check_free(self, new_id: str) -> None:
        if new_id in self.ids:
            kind = "model" if new_id in self._cards else "workflow"
            raise UserError(f"the id {new_id!r} is already taken by a {kind}; choose another")


def check_threading(workflow: Workflow) -> None:
    """Raise a UserError unless each stage can take what the stage before it makes."""
    if not workflow.stages:
        raise UserError(f"{workflow.workflow_id} has no stages; declare at least one")
    names = [stage.name for stage in workflow.stages]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"{workflow.workflow_id} has two stages called {name!r}; rename one")
    for position, stage in enumerate(workflow.stages):
        if position > 0 and stage.task not in TAKES_IMAGE:
            raise UserError(
                f"stage {stage.name!r} of {workflow.workflow_id} does {stage.task}, which takes no "
                f"image from {names[position - 1]!r}; only the first stage may"
            )


def check_stage_card(workflow: Workflow, stage: WorkflowStage, card: ModelCard) -> None:
    """Raise a UserError unless ``card`` does the stage's task through the stage's loop."""
    where = f"stage {stage.name!r} of {workflow.workflow_id}"
    if card.task is not stage.task:
        raise UserError(
            f"{where} needs a {stage.task} model, but {card.model_id} is a {card.task} model"
        )
    if stage.loop_id not in card.loops:
        raise UserError(f"{where} needs the loop {stage.loop_id!r}; {card.model_id} lacks it")
