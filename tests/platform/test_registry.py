"""The kernel registry selects by device, availability and name, and says why not."""

import subprocess
import sys

import pytest

from workflow_rl.errors import UserError
from workflow_rl.platform import FLOW_SDE_STEP, kernels
from workflow_rl.platform.registry import Availability, Kernel, KernelOp, KernelRegistry

OP = KernelOp("double", reference="plain")


def kernel(name: str, priorities: dict[str, int], reason: str = "") -> Kernel:
    return Kernel(
        name=name,
        op=OP,
        priorities=priorities,
        availability=lambda device: Availability(not reason, reason),
        build=lambda: lambda value: (name, 2 * value),
    )


def registry(*members: Kernel) -> KernelRegistry:
    made = KernelRegistry()
    for member in members:
        made.register(member)
    return made


def test_the_default_is_the_available_kernel_of_highest_priority() -> None:
    made = registry(
        kernel("plain", {"cpu": 0, "cuda": 0}),
        kernel("fast", {"cuda": 2}),
        kernel("broken", {"cpu": 9, "cuda": 9}, reason="no compiler"),
    )
    assert made.select(OP, "cpu").name == "plain"
    assert made.select(OP, "cuda").name == "fast"
    assert made.select(OP, "cuda", "plain").function(4) == ("plain", 8)


def test_a_kernel_is_built_once_and_only_when_selected() -> None:
    built: list[str] = []

    def build() -> type[int]:
        built.append("built")
        return int

    made = registry(Kernel("lazy", OP, {"cpu": 1}, lambda _: Availability(True), build))
    made.list()
    assert built == []
    made.select(OP, "cpu")
    made.select(OP, "cpu", "lazy")
    assert built == ["built"]


def test_an_unknown_name_names_the_nearest() -> None:
    made = registry(kernel("plain", {"cpu": 0}), kernel("fast", {"cpu": 1}))
    with pytest.raises(UserError, match=r"unknown kernel 'plane'.* did you mean 'plain'"):
        made.select(OP, "cpu", "plane")


def test_a_kernel_that_cannot_run_here_says_why() -> None:
    made = registry(kernel("broken", {"cpu": 9}, reason="no compiler"))
    with pytest.raises(UserError, match="cannot run on cpu: no compiler"):
        made.select(OP, "cpu", "broken")
    with pytest.raises(UserError, match="has no cuda implementation"):
        made.select(OP, "cuda", "broken")
    with pytest.raises(UserError, match="no kernel of double runs on device 'cpu'"):
        made.select(OP, "cpu")


def test_the_listing_has_reasons_and_marks_the_default() -> None:
    made = registry(kernel("plain", {"cpu": 0}), kernel("broken", {"cpu": 9}, reason="no compiler"))
    assert [(row.kernel, row.available, row.default, row.reason) for row in made.list()] == [
        ("plain", True, True, ""),
        ("broken", False, False, "no compiler"),
    ]


def test_ambiguous_registrations_are_refused() -> None:
    made = registry(kernel("plain", {"cpu": 0}))
    with pytest.raises(ValueError, match="already has a kernel"):
        made.register(kernel("plain", {"cuda": 0}))
    with pytest.raises(ValueError, match="both have priority 0 on cpu"):
        made.register(kernel("other", {"cpu": 0}))


def test_eager_is_the_default_on_cpu() -> None:
    assert kernels.select(FLOW_SDE_STEP, "cpu").name == "torch_eager"
    assert set(kernels.names(FLOW_SDE_STEP)) >= {
        FLOW_SDE_STEP.reference,
        "torch_eager",
        "torch_compile",
    }


def test_every_unavailable_kernel_says_why() -> None:
    for row in kernels.list():
        assert row.available == (row.reason == "")


def test_importing_the_registry_does_not_import_torch() -> None:
    source = "import sys, workflow_rl.platform; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", source], check=False).returncode == 0
