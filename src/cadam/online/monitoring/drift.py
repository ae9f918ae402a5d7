"""The drift alarm: tells that the loss has risen, since when, and which features have changed their distribution.

The loss of blocks of labeled events is compared with that of earlier blocks. Block means of a model that only improves
have a mean that does not rise; an alarm says that it has risen.

The alarm reduces change detection to estimation: a confidence sequence for the mean loss is started at many moments,
and there is an alarm when two of them contradict each other, because the lower end of one that started later is above
the lowest upper end of one that started earlier. If each sequence fails with probability at most alpha, the expected
number of blocks until a false alarm is at least 1 / alpha, whichever of the moments are used. See Shekhar and Ramdas
(2023), "Reducing sequential change detection to sequential estimation", https://arxiv.org/abs/2309.09111.

Each confidence sequence inverts the t test of Lai (1976), "On confidence sequences", Annals of Statistics 4(2), in the
form of Wang and Ramdas (2024), "Anytime-valid t-tests and confidence sequences for Gaussian means with unknown
variance", https://arxiv.org/abs/2310.03722. It assumes that block means are independent and close to normal. A daily
cycle of the loss breaks this assumption, and can cause an alarm.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import astuple, replace
from typing import Any

import numpy as np

from ...checkpoint_files import check_like
from ..data.events import FEATURE_PREFIX, Array, Columns
from ..metrics.log_loss import LogLoss

logger = logging.getLogger("cadam.online")

BLOCK = 2000
"""Labeled events per block."""
FALSE_ALARM_RATE = 1e-3
"""The largest number of false alarms per block, in expectation: one in 1,000 blocks, two million labeled events."""
PRIOR_WEIGHT = 0.1
"""The weight of the prior of the t test, in blocks. A small weight gives finite intervals after few blocks."""
MAX_STARTS = 32
"""The number of moments at which a confidence sequence is started and kept."""
BUCKETS = 32
"""The number of buckets of the histogram of a feature."""
COUNTED_BLOCKS, SAMPLE = 8, 256
"""Features are counted in one of eight blocks and at an alarm, for at most 256 events, because counting takes time."""
NAMED_FEATURES = 3
"""The number of features that an alarm names."""
MIN_DIVERGENCE = 0.01
"""Smaller divergences of a feature are within the noise of its histogram."""


def half_widths(count: Array, variance: Array, alpha: float) -> Array:
    """Return half the width of the anytime-valid t interval for the mean of `count` values; infinite for few values.

    It inverts the t test of Lai (1976), "On confidence sequences", in the form of Wang and Ramdas (2024),
    "Anytime-valid t-tests and confidence sequences for Gaussian means with unknown variance".
    """
    n = np.maximum(count, 2).astype(np.float64)
    factor = ((PRIOR_WEIGHT + n) / (PRIOR_WEIGHT * alpha**2)) ** (1 / n)
    rest = 1 - factor * PRIOR_WEIGHT / (PRIOR_WEIGHT + n)
    is_finite = (count >= 2) & (rest > 0)
    squared = np.where(is_finite, (factor - 1) / np.where(is_finite, rest, 1.0), np.inf)
    with np.errstate(invalid="ignore"):
        widths: Array = np.where(is_finite, np.sqrt(squared * variance * (n - 1) / n), np.inf)
    return widths


class RiseDetector:
    """Detects a rise of the mean of a sequence of values.

    Shekhar and Ramdas (2023), "Reducing sequential change detection to sequential estimation".

    Args:
        alpha: the inverse of the expected number of values until a false alarm.

    Example:
        >>> detector, random = RiseDetector(), np.random.default_rng(0)
        >>> any(detector.add(value) for value in random.normal(0, 1, 100))
        False
        >>> any(detector.add(value) for value in random.normal(5, 1, 20))
        True
    """

    def __init__(self, alpha: float = FALSE_ALARM_RATE) -> None:
        self.alpha = alpha
        self.clear()

    def clear(self) -> None:
        """Forget all values."""
        self.total = 0
        self.starts: Array = np.empty(0, np.int64)
        """The number of values before each confidence sequence."""
        self.means: Array = np.empty(0)
        self.squares: Array = np.empty(0)
        """The mean of the values of each sequence, and the sum of their squared deviations from it."""
        self.lowest_uppers: Array = np.empty(0)
        """For each sequence, the lowest of its upper ends so far; that of a removed sequence passes to the next one."""
        self.rise_start = 0
        """After an alarm: the number of values before the rise, at which the sequence that is too high begins."""

    def add(self, value: float) -> bool:
        """Add a value and return whether it raises an alarm."""
        self.starts = np.concatenate((self.starts, (self.total,)))  # np.append takes twice as long
        self.means, self.squares = np.concatenate((self.means, (0.0,))), np.concatenate((self.squares, (0.0,)))
        self.lowest_uppers = np.concatenate((self.lowest_uppers, (np.inf,)))
        self.total += 1
        count = self.total - self.starts
        deviation = value - self.means
        self.means = self.means + deviation / count
        self.squares = self.squares + deviation * (value - self.means)
        widths = half_widths(count, self.squares / np.maximum(count - 1, 1), self.alpha)
        self.lowest_uppers = np.minimum(self.lowest_uppers, self.means + widths)
        # A mean that falls also leads to contradictions, but there the higher sequence has started earlier.
        excess = self.means - widths - np.minimum.accumulate(self.lowest_uppers)
        highest = int(np.argmax(excess))
        self.rise_start = int(self.starts[highest])
        return bool(excess[highest] > 0)

    def find_redundant(self) -> int | None:
        """Return the index of the start to remove, or None if there are at most `MAX_STARTS`.

        It has the smallest distance to its neighbors in proportion to its age. The starts that remain are dense among
        recent values and sparse among old ones.
        """
        if len(self.starts) <= MAX_STARTS:
            return None
        age = self.total - self.starts
        return 1 + int(np.argmin((age[:-2] - age[2:]) / age[1:-1]))

    def remove(self, index: int) -> None:
        """Remove one of the confidence sequences, but not the last one."""
        self.lowest_uppers[index + 1] = min(self.lowest_uppers[index : index + 2])
        self.lowest_uppers = np.delete(self.lowest_uppers, index)
        self.starts = np.delete(self.starts, index)
        self.means, self.squares = np.delete(self.means, index), np.delete(self.squares, index)


class FeatureHistograms:
    """Histograms of all features since the beginning, of up to `SAMPLE` events in some blocks.

    The buckets of a number lie between quantiles of the first batch. Ids are counted modulo the number of buckets. The
    last bucket is for missing numbers.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.edges: dict[str, Array] = {}
        self.counts = np.zeros((0, BUCKETS))

    def start(self, columns: Columns) -> None:
        """Create an empty histogram for each feature, unless there are histograms already."""
        if not self.names:
            prefixed = [name for name in columns if name.startswith(FEATURE_PREFIX)]
            self.names = [name.removeprefix(FEATURE_PREFIX) for name in prefixed]
            self.counts = np.zeros((len(prefixed), BUCKETS))

    def add(self, columns: Columns) -> None:
        """Count the features of events."""
        self.start(columns)
        samples = {row: columns[FEATURE_PREFIX + name][:SAMPLE] for row, name in enumerate(self.names)}
        # All features with one id per event are counted together, which takes a fraction of the time.
        ids = {row: values for row, values in samples.items() if values.dtype.kind in "iu" and values.ndim == 1}
        if ids:
            buckets = np.stack(list(ids.values())) % (BUCKETS - 1) + BUCKETS * np.arange(len(ids))[:, None]
            counts = np.bincount(buckets.ravel(), minlength=BUCKETS * len(ids))
            self.counts[list(ids)] += counts.reshape(len(ids), BUCKETS)
        for (row, values), name in zip(samples.items(), self.names, strict=True):
            if row not in ids:
                self.counts[row] += self._count(FEATURE_PREFIX + name, values.reshape(-1))

    def _count(self, name: str, values: Array) -> Array:
        if values.dtype.kind in "iu":
            return np.bincount(values % (BUCKETS - 1), minlength=BUCKETS)
        is_present = np.isfinite(values)
        if name not in self.edges and is_present.any():
            # Edges that are equal leave a bucket empty. np.quantile and np.unique would take ten times as long.
            present = np.sort(values[is_present].astype(np.float64))
            self.edges[name] = present[len(present) * np.arange(1, BUCKETS - 1) // (BUCKETS - 1)]
        buckets = np.searchsorted(self.edges.get(name, np.empty(0)), values)
        buckets[~is_present] = BUCKETS - 1
        return np.bincount(buckets, minlength=BUCKETS)


def divergences(before: Array, after: Array) -> Array:
    """Return the Jensen-Shannon divergence of each pair of histograms, from 0 to 1, without the part that is noise.

    The divergence of two samples of the same distribution is above 0: by (k - 1) / (8 ln 2) (1/n + 1/m) on average, for
    k buckets in use and n and m values. See Lin (1991), "Divergence measures based on the Shannon entropy", IEEE
    Transactions on Information Theory 37(1); and Grosse et al. (2002), Physical Review E 65, for the noise.
    """
    sizes = [np.maximum(counts.sum(1, keepdims=True), 1) for counts in (before, after)]
    p, q = before / sizes[0], after / sizes[1]
    middle = (p + q) / 2
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = [np.where(part > 0, part * np.log2(part / middle), 0.0).sum(1) for part in (p, q)]
    used = ((before + after) > 0).sum(1) - 1
    noise = used / (8 * np.log(2)) * (1 / sizes[0][:, 0] + 1 / sizes[1][:, 0])
    result: Array = np.maximum((terms[0] + terms[1]) / 2 - noise, 0.0)
    return result


class DriftMonitor:
    """Raises an alarm when the log loss of a learner has risen. Memory and time per block are constant.

    After an alarm the comparison begins again, so each rise leads to one alarm.

    Args:
        block: labeled events per block.
        alpha: the largest number of false alarms per block, in expectation.
    """

    def __init__(self, block: int = BLOCK, alpha: float = FALSE_ALARM_RATE) -> None:
        self.block = block
        self.alarms = 0
        self.moved: dict[str, float] = {}
        """By how much each feature had moved at the last alarm, as a Jensen-Shannon divergence, largest first."""
        self._last_loss = LogLoss()
        """The sums at the end of the last block."""
        self._detector, self._histograms = RiseDetector(alpha), FeatureHistograms()
        self._snapshots: list[Array] = []
        """The histograms at the start of each confidence sequence."""
        self._losses: list[LogLoss] = []
        """The sums of the log loss at the start of each confidence sequence."""

    def update(self, columns: Columns, total: LogLoss) -> None:
        """Compare the loss, if a block is complete.

        Args:
            columns: the labeled events by which the loss was updated last.
            total: the loss since the stream began.
        """
        if total.count - self._last_loss.count < self.block:
            return
        mean = (total - self._last_loss).mean
        if not np.isfinite(mean):
            return
        self._histograms.start(columns)
        self._snapshots.append(self._histograms.counts.copy())
        self._losses.append(self._last_loss)
        is_counted = self._detector.total % COUNTED_BLOCKS == 0
        if is_counted:
            self._histograms.add(columns)
        self._last_loss = replace(total)
        if self._detector.add(mean):
            if not is_counted:
                self._histograms.add(columns)
            self._raise_alarm(total)
        elif (redundant := self._detector.find_redundant()) is not None:
            self._detector.remove(redundant)
            del self._snapshots[redundant], self._losses[redundant]

    def _raise_alarm(self, total: LogLoss) -> None:
        """Log the alarm with the features that moved most, and begin again."""
        start = self._detector.starts.tolist().index(self._detector.rise_start)
        before = self._losses[start] - self._losses[0]
        since = total - self._losses[start]
        counts = self._histograms.counts
        moved = divergences(self._snapshots[start] - self._snapshots[0], counts - self._snapshots[start])
        order = np.argsort(-moved, kind="stable")
        self.moved = {self._histograms.names[row]: float(moved[row]) for row in order}
        self.alarms += 1
        logger.warning(
            "drift: the log loss rose from %.4f to %.4f over the last %s labeled events. %s",
            *(before.mean, since.mean, f"{since.count:,}", describe_moved(self.moved)),
        )
        self._detector.clear()
        self._snapshots, self._losses = [], []

    def results(self) -> dict[str, float]:
        """Return the number of alarms, and by how much each feature had moved at the last one."""
        return {"drift_alarms": self.alarms, **{f"drift_feature/{name}": value for name, value in self.moved.items()}}

    def state_dict(self) -> dict[str, Any]:
        """Return everything that later alarms depend on."""
        detector, histograms = self._detector, self._histograms
        return {
            "block": self.block,
            "alarms": self.alarms,
            "moved": dict(self.moved),
            "last_loss": list(astuple(self._last_loss)),
            "losses": [list(astuple(loss)) for loss in self._losses],
            "snapshots": list(self._snapshots),
            "detector": {**vars(detector), "starts": detector.starts.copy()},
            "histograms": {
                "names": list(histograms.names),
                "edges": dict(histograms.edges),
                "counts": histograms.counts.copy(),
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that `state_dict` returned.

        Raises:
            ValueError: if the blocks have another length.
        """
        loss, array = list(astuple(self._last_loss)), np.empty(0)
        example = {
            "block": 0,
            "alarms": 0,
            "moved": dict.fromkeys(state["moved"], 0.0),
            "last_loss": loss,
            "losses": [loss] * len(state["losses"]),
            "snapshots": [array] * len(state["snapshots"]),
            "detector": vars(self._detector),
            "histograms": {
                "names": [""] * len(state["histograms"]["names"]),
                "edges": dict.fromkeys(state["histograms"]["edges"], array),
                "counts": array,
            },
        }
        check_like(state, example, "drift")
        if state["block"] != self.block:
            raise ValueError(f"blocks have {self.block} events here and {state['block']} in the state")
        self.alarms, self.moved = state["alarms"], dict(state["moved"])
        self._last_loss = LogLoss(*state["last_loss"])
        self._losses = [LogLoss(*sums) for sums in state["losses"]]
        self._snapshots = [np.array(counts) for counts in state["snapshots"]]
        vars(self._detector).update(
            {
                name: np.array(value) if isinstance(value, np.ndarray) else value
                for name, value in state["detector"].items()
            }
        )
        histograms = state["histograms"]
        self._histograms.names = list(histograms["names"])
        self._histograms.edges = {name: np.array(edges) for name, edges in histograms["edges"].items()}
        self._histograms.counts = np.array(histograms["counts"])


def describe_moved(moved: Mapping[str, float]) -> str:
    """Name the features whose distribution moved most, or say that none has moved."""
    names = [f"{name} ({value:.2f})" for name, value in list(moved.items())[:NAMED_FEATURES] if value >= MIN_DIVERGENCE]
    if not names:
        return "The distribution of no feature has moved, so the relation of features and label has probably changed"
    return f"The features whose distribution moved most (0 to 1): {', '.join(names)}"
