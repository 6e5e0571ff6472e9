"""The exceptions of WorkflowRL."""


class WorkflowRLError(Exception):
    """Base of every exception that WorkflowRL raises on purpose."""


class UserError(WorkflowRLError):
    """A fault in what the user gave: a configuration, a file, a folder, a prompt.

    The message is one line and has three parts: what was found, what was expected, and how to
    mend it. The command line prints it after ``error:`` and exits with code 2, without a
    traceback.

    Raises
    ------
    ValueError
        When the message has more than one line.
    """

    def __init__(self, message: str) -> None:
        if "\n" in message:
            raise ValueError(f"a UserError is one line, got {message!r}")
        super().__init__(message)
