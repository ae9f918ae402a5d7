"""The metrics of a learner as Prometheus metric families.

Counts appear twice. A counter such as `cadam_events_total` starts at 0 with the process, as Prometheus expects, so that
`rate()` is correct across restarts. A gauge such as `cadam_events` counts since the stream began, however often the run
was resumed; it decreases after a crash by what has to be computed again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ...printable import printable
from ..metrics.stream import METRICS

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from ..learner import Learner

PROMETHEUS_REQUIRED = "--status and --prometheus need prometheus_client: pip install prometheus_client"
COUNTS: Mapping[str, str] = {
    "events": "events that were predicted",
    "learned": "events that the model was trained on",
    "steps": "steps of the optimizer",
    "rejected": "rejected events",
    "repeated_events": "events that arrived again",
    "repeated_labels": "labels that arrived again",
    "late_labels": "labels that arrived after the horizon",
    "orphan_labels": "labels whose event never arrived",
    "expired": "events whose label did not arrive within the horizon",
    "crowded_out": "events that expired early because too many events were pending",
    "failed_checkpoints": "checkpoints that could not be written",
}
"""Descriptions of the values that only grow."""
GAUGES: Mapping[str, str] = {
    "rejected_share": "share of rejected events",
    "missing_columns": "events without a column of the schema, since the stream began",
    "missing_share": "share of the events without a column of the schema, since the stream began",
    "pending": "events that wait for their label",
    "labeled": "predictions whose label is known",
    "mean_label": "mean of the labels",
    "best_constant": "log loss of the best constant prediction in hindsight",
    "recent_labeled": "number of labeled predictions that the other recent values describe",
    "recent_log_loss": "log loss of the last labeled predictions",
    "recent_best_constant": "log loss of the best constant prediction in hindsight, for the last labeled predictions",
    "time": "time of the last event",
    "drift_alarms": "drift alarms: how often the log loss has risen, since the stream began",
    "drift_feature": "Jensen-Shannon divergence by which a feature had moved at the last drift alarm, from 0 to 1",
    "alignment_over_all": "share of elements whose momentum and gradient have the same sign",
    "alignment_over_touched": "share of elements with a nonzero gradient whose momentum has the same sign",
    "learning_rate": "learning rate that is in use, if it is tuned",
    "learning_rate_switches": "changes of the learning rate since the stream began",
    "learning_rate_candidates": "models that learn at different learning rates at the moment",
    "id_rows": "ids that have a row",
    "id_admitted": "times that an id got a row, since the stream began",
    "id_evicted": "times that an id lost its row because all rows were in use, since the stream began",
    "id_expired": "times that an id lost its row because it was not seen for long, since the stream began",
    "id_refused": "trained ids without a row, since the stream began",
    "id_collisions_avoided": "ids that would be expected to share a row in a hashed table with as many rows",
    "events_a_second": "events per second since the process started or resumed",
    "lag_in_seconds": "seconds from the newest event to its processing; NaN if the stream is not live",
    "backlog": "messages that the source has not read yet",
    **{name: description for metric in METRICS.values() for name, description in metric.outputs.items()},
}
"""Descriptions of all other values."""


def check_installed() -> None:
    """Raise ImportError with an instruction if prometheus_client is not installed."""
    try:
        import prometheus_client  # noqa: F401
    except ImportError as error:
        raise ImportError(PROMETHEUS_REQUIRED) from error


def families(learner: Learner, values: Mapping[str, float] | None = None) -> list[Metric]:
    """Collect all values of a learner as metric families.

    Args:
        learner: the learner.
        values: its metrics and health, if they have been computed already.
    """
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    values = {**learner.metrics(), **learner.health()} if values is None else values
    earlier = learner.counts_at_start
    counters: list[Metric] = []
    gauges: dict[str, Metric] = {}

    def gauge(name: str) -> Metric:
        if name not in gauges:
            text = f"{COUNTS[name]}, since the stream began" if name in COUNTS else GAUGES.get(name, name)
            gauges[name] = GaugeMetricFamily(f"cadam_{sanitize(name)}", text)
        return gauges[name]

    for name, description in COUNTS.items():
        if name in values and name != "rejected":
            count = values[name] - earlier.get(name, 0)
            counters.append(CounterMetricFamily(f"cadam_{name}", f"{description}, since the process began", count))
    rejected = CounterMetricFamily("cadam_rejected", "rejected events, since the process began", labels=["reason"])
    for reason, count in learner.rejections.reasons.items():
        rejected.add_metric([reason], count - earlier.get(f"rejected/{reason}", 0))
        gauge("rejected").add_sample("cadam_rejected", {"reason": reason}, count)
    missing_text = "events without a column of the schema"
    missing = CounterMetricFamily(
        "cadam_missing_columns", f"{missing_text}, since the process began", labels=["column"]
    )
    for column, count in learner.missing_columns.items():
        missing.add_metric([printable(column)], count - earlier.get(f"missing_columns/{column}", 0))
        gauge("missing_columns").add_sample("cadam_missing_columns", {"column": printable(column)}, count)
        share = count / max(learner.events + learner.rejected, 1)
        gauge("missing_share").add_sample("cadam_missing_share", {"column": printable(column)}, share)
    counters += [rejected, missing]
    for key, value in values.items():
        name, _, rest = key.partition("/")
        if key == "events/total":
            continue  # the number of labeled events, which is also reported as `labeled`
        is_feature = name == "drift_feature" or name.startswith("id_")
        label = "parameter" if name.startswith("alignment") else "feature" if is_feature else "scope"
        text = rest if label == "parameter" else printable(rest)  # names of parameters are those of the model's code
        gauge(name).add_sample(f"cadam_{sanitize(name)}", {label: text} if rest else {}, value)
    return [*counters, *gauges.values()]


def sanitize(name: str) -> str:
    """Replace everything except ASCII letters and digits by underscores."""
    return "".join(c if c.isascii() and c.isalnum() else "_" for c in name)


def to_text(metric_families: Iterable[Metric]) -> str:
    """Format metric families in the text format of Prometheus."""
    from prometheus_client.exposition import generate_latest

    class Registry:
        def collect(self) -> Iterable[Metric]:
            return metric_families

    registry: Any = Registry()
    text: bytes = generate_latest(registry)
    return text.decode()


def to_samples(metric_families: Iterable[Metric]) -> list[tuple[str, dict[str, str], float | None]]:
    """List name, labels and value of each sample, with None for values that JSON cannot represent."""
    return [
        (sample.name, dict(sample.labels), float(sample.value) if math.isfinite(sample.value) else None)
        for family in metric_families
        for sample in family.samples
    ]
