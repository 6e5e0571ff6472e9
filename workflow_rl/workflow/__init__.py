"""Chains of model instances, servable under one id."""

from workflow_rl.workflow.chain import StageOutput, StagePlan, joined_shots, run_chain
from workflow_rl.workflow.t2i_i2v import T2I_I2V
from workflow_rl.workflow.workflow import Catalog, Workflow, WorkflowStage

__all__ = [
    "T2I_I2V",
    "Catalog",
    "StageOutput",
    "StagePlan",
    "Workflow",
    "WorkflowStage",
    "joined_shots",
    "run_chain",
]
