"""From an entry of a configuration to the reward that another process or a server computes."""

from collections.abc import Mapping
from typing import Any

from workflow_rl.errors import UserError
from workflow_rl.rewards.base import AcceptedKind
from workflow_rl.rewards.groupwise import Groupwise
from workflow_rl.rewards.python_callable import check_arguments
from workflow_rl.rewards.registry import GroupKind, RewardSpec, reward_class
from workflow_rl.rewards.remote.base import RemoteReward
from workflow_rl.rewards.remote.client import ServerReward
from workflow_rl.rewards.remote.process import ProcessReward


def build_elsewhere(spec: RewardSpec) -> tuple[RemoteReward, GroupKind | None]:
    """The reward of an entry that says where it runs, and what it compares.

    A callable is not imported here: what it needs may be installed there alone.

    Raises
    ------
    UserError
        Two places, an unknown name, arguments that a named reward does not take, a group of one
        that has none, an interpreter that is not there.
    """
    label = (spec.name or str(spec.callable)).replace(":", ".")
    if spec.process is not None and spec.server is not None:
        raise UserError(
            f"reward {label!r} has process and server, but runs in one place: leave one out"
        )
    kind, group = _about(spec)
    if spec.server is not None:
        options = dict(spec.server)
        url = options.pop("url")
        return ServerReward(url, name=label, media_kind=kind, args=spec.args, **options), group
    options = dict(spec.process or {})
    entry: Mapping[str, Any] = {
        "name": spec.name,
        "callable": spec.callable,
        "args": dict(spec.args),
        "group": spec.group,
    }
    return ProcessReward(entry, name=label, media_kind=kind, **options), group


def _about(spec: RewardSpec) -> tuple[AcceptedKind, GroupKind | None]:
    """What an entry's reward accepts and compares, without building it."""
    if spec.name is None:
        return "any", spec.group
    builder = reward_class(spec.name)
    if spec.server is None:
        check_arguments(builder, (), spec.args, spec.name)
    if issubclass(builder, Groupwise):
        return builder.media_kind, spec.group or "prompt"
    if spec.group is not None:
        raise UserError(
            f"reward {spec.name!r} scores each sample alone, so it has no group: leave group out"
        )
    return builder.media_kind, None
