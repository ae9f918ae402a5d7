"""Control arms with simulated results, beside the archived results of Adam and CAdam."""

from __future__ import annotations

from cadam_paper import catalog
from cadam_paper.harness import runner
from cadam_paper.harness.control_arms import CONTROL_ARMS
from cadam_paper.harness.experiment import Experiment
from cadam_paper.harness.results import Outcome, Provenance, Result, RunSpec
from cadam_paper.published import archive

ROWS = {"fig-rates-clicks-controls": 6_000_000}
"""The number of rows that the runs of Adam and CAdam were archived with, by experiment."""


class SimulatedControls:
    """An experiment on control arms at full scale. Each control arm is best at the middle rate of its grid."""

    def __init__(self, name: str) -> None:
        experiment = catalog.find(name)
        self._results: dict[RunSpec, Result] = {}
        self.request = runner.Request(experiment, experiment.plan("full", rows=ROWS.get(name)))
        runner.look_up(self.request, self._find)

    def _find(self, experiment: Experiment, spec: RunSpec) -> Result | None:
        return self._results.get(spec) if spec.optimizer in CONTROL_ARMS else archive().find(experiment, spec)

    def compute(self, *, but: int = 0) -> None:
        """Simulate the missing runs of the next condition, except the last ones.

        Args:
            but: The number of runs that remain missing.
        """
        missing = self.request.missing
        for spec in missing[: len(missing) - but]:
            grid = sorted({each.lr for each in missing if each.optimizer == spec.optimizer})
            value = 60 - 9 * abs(grid.index(spec.lr) - 1) + 0.1 * spec.seed
            outcome = Outcome(dict.fromkeys(("accuracy", "stream_auc", "test_auc"), value))
            self._results[spec] = Result(spec, outcome, Provenance(1.0, 1, "none", {}))
        runner.look_up(self.request, self._find)
