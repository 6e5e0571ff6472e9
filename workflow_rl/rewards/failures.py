"""Why samples failed, counted in words that are the same whenever the same thing happens."""

import re
from collections import Counter
from collections.abc import Iterable

from workflow_rl.rewards.composite import TreeScores

CHAIN = "chain"
"""What a cause is counted under that no reward is to blame for."""
MAX_CAUSES = 8
"""Causes that are told apart for one reward; the rest are counted together."""
MAX_LENGTH = 200
OTHER = "other causes"
_PASSING = re.compile(
    r"\b0x[0-9a-f]+\b|\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b|\breq_\w+|/tmp/\S+",
    re.IGNORECASE,
)
"""Addresses, ids of requests and temporary files: another one each time."""


def stable_reason(reason: str) -> str:
    """A reason on one line, without what differs from one run to the next."""
    return _PASSING.sub("…", " ".join(reason.split()))[:MAX_LENGTH]


def failure_causes(scores: TreeScores) -> dict[str, dict[str, int]]:
    """Why leaves failed: per reward's label each cause and how many leaves have it.

    Returns
    -------
    dict of str to (dict of str to int)
        Only rewards that failed some, also those with weight 0; causes by falling number, at most
        ``MAX_CAUSES`` of them. Leaves that were not made well, or whose sum overflows, are under
        ``chain``.
    """
    causes = {
        label: _counted(failures.values())
        for label, failures in scores.component_failures.items()
        if failures
    }
    blamed = tuple(f"{label}: " for label in scores.component_failures)
    others = _counted(why for why in scores.failures.values() if not why.startswith(blamed))
    return causes | ({CHAIN: others} if others else {})


def _counted(reasons: Iterable[str]) -> dict[str, int]:
    counts = Counter(stable_reason(reason) for reason in reasons)
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    told = dict(ranked[:MAX_CAUSES])
    rest = sum(count for _, count in ranked[MAX_CAUSES:])
    return told | ({OTHER: rest} if rest else {})
