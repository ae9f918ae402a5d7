"""The metrics of a learner as Prometheus has them: what each is called, whether it is a counter, and what it means.

Counts are there twice. A counter, `cadam_events_total`, begins at 0 with the process, as Prometheus expects it, so that
`rate()` is right across restarts. A gauge, `cadam_events`, is the count since the stream began, however often the run
was resumed; it goes back by what is learnt again after a crash.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from ..learner import Learner

NEEDS = "--status and --prometheus need prometheus_client: pip install prometheus_client"
COUNTS: Mapping[str, str] = {
    "events": "events that were predicted",
    "learned": "events that were learnt from",
    "steps": "steps of the optimizer",
    "rejected": "rejected events",
    "repeated_events": "events that came again",
    "repeated_labels": "labels that came again",
    "late_labels": "labels that came after the horizon",
    "orphan_labels": "labels whose event never came",
    "expired": "events whose label did not come within the horizon",
    "crowded_out": "events that gave way to newer ones before their label came",
    "failed_checkpoints": "checkpoints that the disk did not take",
}
GAUGES: Mapping[str, str] = {
    "rejected_share": "rejected events among all",
    "pending": "events that wait for their label",
    "labelled": "predictions whose label is known",
    "mean_label": "mean of the labels",
    "log_loss": "mean log loss of the predictions",
    "best_constant": "log loss of the best constant prediction, known afterwards",
    "time": "time of the last event",
    "auc": "area under the ROC curve",
    "gauc_by_impressions": "AUC within each user, weighted by their events",
    "gauc_by_user": "AUC within each user, each weighing the same",
    "users_of_both_classes": "users with both kinds of labels",
    "users_of_one_class": "users with one kind of label, who have no AUC",
    "normalised_entropy": "log loss over that of the best constant",
    "calibration": "predicted clicks over actual clicks",
    "click_rate": "share of clicks",
    "alignment_over_all": "share of elements whose momentum and gradient agree in sign",
    "alignment_over_touched": "the same among elements whose gradient is not 0",
    "events_a_second": "events a second since the process started or resumed",
    "lag_in_seconds": "seconds by which the newest event is behind the clock; NaN for a stream of long ago",
    "backlog": "messages that the source has and that were not read yet",
}


def check_installed() -> None:
    try:
        import prometheus_client  # noqa: F401
    except ImportError as error:
        raise ImportError(NEEDS) from error


def families(learner: Learner, numbers: Mapping[str, float] | None = None) -> list[Metric]:
    """Every number of the learner: its metrics and its health, unless they are given."""
    from prometheus_client.core import CounterMetricFamily

    numbers = {**learner.metrics(), **learner.health()} if numbers is None else numbers
    found: dict[str, Metric] = {}
    for name, help in COUNTS.items():
        if name in numbers and name != "rejected":
            since = numbers[name] - learner.counts_before.get(name, 0)
            counter = CounterMetricFamily(f"cadam_{name}", f"{help}, since the process began", value=since)
            found[f"{name}, counted"] = counter
    rejected = CounterMetricFamily("cadam_rejected", "rejected events, since the process began", labels=["reason"])
    for reason, count in learner.rejections.reasons.items():
        rejected.add_metric([reason], count - learner.counts_before.get(f"rejected/{reason}", 0))
        _gauge(found, "rejected").add_sample("cadam_rejected", {"reason": reason}, count)
    found["rejected, counted"] = rejected
    for key, value in numbers.items():
        name, _, rest = key.partition("/")
        if key == "events/total":
            continue  # of labelled predictions, which have a name of their own
        what = "parameter" if name.startswith("alignment") else "stretch"
        _gauge(found, name).add_sample(f"cadam_{plain(name)}", {what: rest} if rest else {}, value)
    return list(found.values())


def _gauge(found: dict[str, Metric], name: str) -> Metric:
    from prometheus_client.core import GaugeMetricFamily

    if name not in found:
        help = f"{COUNTS[name]}, since the stream began" if name in COUNTS else GAUGES.get(name, name)
        found[name] = GaugeMetricFamily(f"cadam_{plain(name)}", help)
    return found[name]


def plain(name: str) -> str:
    """A name of letters, digits and underscores."""
    return "".join(c if c.isascii() and c.isalnum() else "_" for c in name)


def text(given: Iterable[Metric]) -> str:
    """As Prometheus reads it."""
    from prometheus_client.exposition import generate_latest

    class Registry:
        def collect(self) -> Iterable[Metric]:
            return given

    registry: Any = Registry()
    written: bytes = generate_latest(registry)
    return written.decode()


def samples(given: Iterable[Metric]) -> list[tuple[str, dict[str, str], float | None]]:
    """Name, labels and value of each sample; None where the value is not finite, which JSON has no word for."""
    return [
        (sample.name, dict(sample.labels), float(sample.value) if math.isfinite(sample.value) else None)
        for family in given
        for sample in family.samples
    ]
