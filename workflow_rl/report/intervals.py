"""The intervals of the report."""

from __future__ import annotations

from collections.abc import Sequence

from workflow_rl.evaluation.statistics import (
    Interval,
    PairedComparison,
    bootstrap_interval,
    paired_bootstrap,
)
from workflow_rl.report.run_data import RunData


class Statistics:
    """Intervals at the confidence that the run's configuration asks for."""

    def __init__(self, run: RunData) -> None:
        self.confidence = run.config.evaluation.confidence
        self._samples = run.config.evaluation.bootstrap_samples

    def interval(self, values: Sequence[float], prompts: Sequence[str]) -> Interval:
        """Return the mean with an interval over prompts."""
        return bootstrap_interval(
            values, clusters=prompts, confidence=self.confidence, samples=self._samples
        )

    def compare(
        self, before: Sequence[float], after: Sequence[float], prompts: Sequence[str]
    ) -> PairedComparison:
        """Return the paired comparison with an interval over prompts."""
        return paired_bootstrap(
            before, after, clusters=prompts, confidence=self.confidence, samples=self._samples
        )
