"""``workflow-rl kernels``."""

from rich.console import Console
from rich.table import Table

from workflow_rl.platform import kernels


def list_kernels() -> None:
    """List the kernels of every operation: which can run here, and why others can't.

    Name one in the configuration to choose it, as in `stages.t2i.kernel=torch_eager`; without a
    name the default of the device is used. The behaviour record of a rollout names the kernel that
    made it.

    **Example**

    ```
    workflow-rl kernels
    ```
    """
    table = Table("operation", "kernel", "device", "runs here", "default")
    for row in kernels.list():
        runs = "yes" if row.available else f"no: {row.reason}"
        table.add_row(row.op, row.kernel, row.device, runs, "✓" if row.default else "")
    Console().print(table)
