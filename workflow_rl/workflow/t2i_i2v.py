"""The text-to-image-to-video chain."""

from workflow_rl.request import TaskType
from workflow_rl.workflow.workflow import Workflow, WorkflowStage

T2I_I2V = Workflow(
    "image_video.t2i_i2v",
    (WorkflowStage("t2i", TaskType.T2I), WorkflowStage("i2v", TaskType.I2V)),
)
"""A text-to-image model whose image is the first frame of an image-to-video model."""
