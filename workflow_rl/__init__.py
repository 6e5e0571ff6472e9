"""WorkflowRL: train a text → image → video chain from one reward on the final video.

Importing this package is cheap. PyTorch and diffusers load with the submodule that needs them.
"""

__version__ = "0.1.0"
