"""The guard: stops the publication of snapshots when the log loss has risen.

Corrupted labels, for example of a client that reports all outcomes inverted, spoil a model within minutes. They show as
a rise of the log loss of new labels under the predictions that were made before them. The guard therefore compares the
loss of each block of labels with that of the blocks before it, as a control chart does (Shewhart 1931, "Economic
control of quality of manufactured product"): there is an alert if the block lies above the prediction interval of
Student's t. The interval assumes that the losses of the last blocks are independent and close to normal. Paired losses
of the learner and of an earlier version on the same labels need no such assumption, but could not find corrupted
labels: the learner fits them, so that it is better than the earlier version as long as they come. The drift alarm of
`cadam run` finds smaller and slower rises, and needs more blocks for a large one, in which corrupted labels are
learned.

The reverse holds after the alert. A sudden change of the world raises the loss in the same way, and no test of labels
alone can tell it from corrupted labels. The guard therefore only gives people time. After `hold` seconds it compares
the learner with the served version on the same new labels, in pairs and with a confidence sequence: if the learner is
better, the world has changed and publication resumes; if it is not, labels were corrupted and the alert stays until a
rollback. An alert without a cause ends in the same way.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np

from ..online.data.events import Array, Columns, select_features
from ..statistics.paired_scores import log_losses
from ..statistics.sequential import ConfidenceSequence, student_quantile

if TYPE_CHECKING:
    from ..online.training_step import TrainingStep
    from .snapshots import ServedModel

logger = logging.getLogger("cadam.serving")

BLOCK = 1000
"""The smallest number of labeled events per block of the test for a rise."""
EFFECTIVE_EVENTS = 100
"""The smallest effective number of events per block, (sum of losses)^2 / (sum of squared losses). With rare positives
it is about their number, and the loss of a block with few of them would be far from normal."""
MIN_BLOCKS, MAX_BLOCKS = 20, 50
"""The number of earlier blocks with which a block is compared."""
FALSE_ALERT_RATE = 1e-6
"""The expected number of false alerts per block: three in a year with one block in ten seconds. In simulated streams of
four million blocks whose share of positives is 30%, 2% or 0.1%, it was below 3e-6."""
BLOCK_OF_COMPARISON = 100
"""Labeled events per block of the comparison between the learner and the served version."""


class Guard:
    """Watches the log loss of a learner.

    A control chart raises the alert (Shewhart 1931, "Economic control of quality of manufactured product"). The
    comparison that ends it uses the confidence sequence of Choe and Ramdas (2024), "Comparing sequential forecasters".

    Args:
        hold: the shortest time in seconds from an alert to its end without a rollback.
    """

    def __init__(self, hold: float) -> None:
        self.hold = hold
        self.alerts = 0
        self.position: int | None = None
        """During an alert, the position in the log before the loss rose; otherwise None."""
        self.served: ServedModel | None = None
        """During an alert, the version that is served, with which the learner is compared."""
        self._time_of_alert = 0.0
        self._block_position = 0
        """The position in the log before the present block."""
        self._means: list[float] = []
        """The mean losses of the last blocks."""
        self._sums: Array = np.zeros(3)
        """The number of events of the present block, the sum of their losses, and of their squared losses."""
        self._sequence = ConfidenceSequence()
        self._differences: list[float] = []

    @property
    def is_alert(self) -> bool:
        """Whether snapshots must not be published."""
        return self.position is not None

    def clear(self) -> None:
        """End an alert, and begin the comparison of the loss again."""
        self.position, self.served = None, None
        self._means, self._sums, self._differences = [], np.zeros(3), []

    def update(self, columns: Columns, training: TrainingStep, position: int) -> None:
        """Add labeled events, before the learner is trained on them.

        Args:
            columns: the events, with their features, labels and scores.
            training: computes scores with the present weights of the learner.
            position: the position in the log before these labels.
        """
        if self.is_alert:
            self._compare(columns, training)
            return
        if not self._sums[0]:
            self._block_position = position
        losses = log_losses(columns["score"], columns["label"])
        self._sums = self._sums + np.array([len(losses), losses.sum(), np.square(losses).sum()])
        count, total, squares = self._sums.tolist()
        if count < BLOCK or total**2 < EFFECTIVE_EVENTS * squares:
            return
        mean, self._sums = total / count, np.zeros(3)
        if mean > upper_limit(self._means):
            self._raise_alert(mean)
        else:
            self._means = [*self._means, mean][-MAX_BLOCKS:]

    def _raise_alert(self, loss: float) -> None:
        position = self._block_position
        self.clear()
        self.position, self._time_of_alert, self._sequence = position, time.time(), ConfidenceSequence()
        self.alerts += 1
        logger.error(
            "the log loss has risen to %.4f since entry %d of the log: no new versions are served. If labels were "
            "wrong, roll back; otherwise this ends by itself, in %g seconds at the earliest",
            *(loss, position, self.hold),
        )

    def _compare(self, columns: Columns, training: TrainingStep) -> None:
        """Compare the learner with the served version, and end the alert if the learner is better."""
        if self.served is None or time.time() < self._time_of_alert + self.hold:
            return
        features = select_features(columns)
        scores = training.predict(features, len(columns["label"]))
        losses = [log_losses(each, columns["label"]) for each in (scores, self.served.scores(features)[1])]
        self._differences += (losses[0] - losses[1]).tolist()
        if len(self._differences) < BLOCK_OF_COMPARISON:
            return
        difference, count, self._differences = float(np.mean(self._differences)), len(self._differences), []
        if math.isfinite(difference):
            self._sequence.update(difference, count)
        if self._sequence.interval.high < 0:
            logger.warning("the learner is better than the served version again: new versions are served")
            self.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return everything that later alerts and the end of this one depend on."""
        return {
            "alerts": self.alerts,
            "position": self.position,
            "time": self._time_of_alert,
            "block_position": self._block_position,
            "means": list(self._means),
            "sums": self._sums.copy(),
            "sequence": self._sequence.state_dict(),
            "differences": list(self._differences),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that `state_dict` returned."""
        self.alerts, self.position, self._time_of_alert = state["alerts"], state["position"], state["time"]
        self._block_position, self._means = state["block_position"], list(state["means"])
        self._sums = np.array(state["sums"])
        self._sequence.load_state_dict(state["sequence"])
        self._differences = list(state["differences"])


def upper_limit(values: Sequence[float]) -> float:
    """Return the value that the next one exceeds with probability `FALSE_ALERT_RATE`; infinite for few values.

    It is the upper end of a prediction interval of Student's t for independent normal values (Hahn and Meeker 1991,
    "Statistical Intervals", chapter 4).
    """
    count = len(values)
    if count < MIN_BLOCKS:
        return math.inf
    quantile = student_quantile(NormalDist().inv_cdf(1 - FALSE_ALERT_RATE), count - 1)
    return float(np.mean(values) + quantile * np.std(values, ddof=1) * math.sqrt(1 + 1 / count))
