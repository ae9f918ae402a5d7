"""The table of CAdam, Adam and the two other masks over all archived studies, each at its own best learning rate."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from cadam.ab.text import join_words
from cadam.statistics.comparison import Better, sign
from cadam.statistics.intervals import Interval

from . import catalog, evidence
from .continual import study as continual
from .continual.tasks import CONDITIONS
from .ctr import rates as click_rates
from .harness import control_arms
from .harness.ab_evidence import MAIN_METRIC
from .harness.rate_controls import Controls, complete_curves
from .harness.rate_pairs import Pair
from .harness.rates import RateCurve, compare_at_best_rates
from .harness.results import Results
from .images import rates as image_rates
from .language_models import study as language_models
from .published import (
    archive,
    difference_of,
    find_row,
    format_interval,
    is_complete,
    is_significant_among,
    load,
    table_header,
    table_row,
)
from .stream_tables import MAIN, OWN, STREAMS

CADAM, CAUTIOUS, RANDOM, LONG = "CAdam", "cautious", "random mask", "beta1 0.95"
ARMS = (CADAM, CAUTIOUS, RANDOM, LONG)
"""The arms that are compared with Adam; on language models AdamW and CAdamW."""
NAMES = {
    CADAM: "CAdam",
    CAUTIOUS: control_arms.CAUTIOUS,
    RANDOM: control_arms.RANDOM,
    LONG: control_arms.LONG_MOMENTUM,
}
"""The names of the arms in the results of all studies but those of language models."""
LANGUAGE_MODELS = {
    "lm-shift": "GPT 3M, one domain after the other",
    "lm-mixed": "GPT 3M, domains mixed",
    "lm-cosine": "GPT 3M, domains mixed, cosine schedule",
    "lm-noise": "GPT 3M, 20% of the targets random",
    "lm-shift-10m": "GPT 10M, one domain after the other",
    "lm-mixed-10m": "GPT 10M, domains mixed",
}
"""The experiments on language models. A model's control arms are in the experiment of the same name and `-controls`."""

STREAM_PREFIX = "stream, "
CLICKS = "DeepFM, generated clicks"
ON_GPU = {"VGG-16, ": "images", "ResNet-18, ": "images", f"{CLICKS}, ": "generated clicks"}
"""The kind of data of studies that were run before the control arms were built, by the start of their names."""
CONTINUAL = {"continual": "200 tasks in turn", "continual-small": "100 tasks in turn"}
"""The experiments on continual learning."""


@dataclass(frozen=True)
class Line:
    """One study: the value of Adam, and the differences of the other arms from it, where they were run.

    Attributes:
        study: The name of the study.
        measure: The compared metric, its unit, and whether lower or higher is better.
        adam: The mean of Adam over seeds.
        differences: The difference of an arm from Adam, by the name of the arm.
        from_controls: The difference of CAdam from a control arm, by the name of the arm.
        better: Whether a lower or a higher value is better.
    """

    study: str
    measure: str
    adam: float
    differences: Mapping[str, Interval]
    from_controls: Mapping[str, Interval] = field(default_factory=dict)
    better: Better = "higher"


def lines() -> list[Line]:
    """Return all studies whose runs over learning rates are archived completely."""
    return [*_image_lines(), *_click_lines(), *_language_model_lines(), *_continual_lines(), *_stream_lines()]


def _image_lines() -> Iterable[Line]:
    for (model, condition), pair in evidence.adam_pairs().items():
        line = _pair_line(f"{model}, {condition}", "accuracy, %", pair)
        name = f"{evidence.MODELS[model]}-controls"
        yield _with_controls(line, name, image_rates.CONTROLS[name], condition)


def _click_lines() -> Iterable[Line]:
    for condition, pair in evidence.click_pairs().items():
        line = _pair_line(f"{CLICKS}, {condition}", "AUC, %", pair)
        yield _with_controls(line, f"{evidence.CLICK_CURVES}-controls", click_rates.CONTROLS, condition)


def _pair_line(study: str, measure: str, pair: Pair) -> Line:
    own = pair.at_own_rates
    return Line(study, measure, own.baseline_mean, {CADAM: own.difference})


def _with_controls(line: Line, name: str, controls: Controls, label: str) -> Line:
    """Add the control arms of an experiment to the line of a condition, if their runs are archived.

    An experiment may be incomplete: a condition is used once the runs of both masks are archived. The difference of
    CAdam from Adam remains that of all archived seeds; the others are over the seeds of the control arms.
    """
    if archive().plan(catalog.find(name)) is None:
        return line
    request = load(name)
    (condition,) = (condition for condition in controls.conditions if condition.label == label)
    curves = complete_curves(request.results, request.missing, condition)
    arms = {arm: curves[NAMES[arm]] for arm in ARMS if NAMES[arm] in curves and arm != CADAM}
    return replace(
        line,
        differences={
            **line.differences,
            **{arm: compare_at_best_rates(curve, curves["Adam"]).difference for arm, curve in arms.items()},
        },
        from_controls={
            arm: compare_at_best_rates(curves[NAMES[CADAM]], curve).difference for arm, curve in arms.items()
        },
    )


def _language_model_lines() -> Iterable[Line]:
    names = {
        CADAM: "CAdamW",
        CAUTIOUS: "cautious AdamW",
        RANDOM: "AdamW with a random mask",
        LONG: "AdamW with beta1 0.95",
    }
    for name, label in LANGUAGE_MODELS.items():
        experiment = f"{name}-controls" if name.endswith("10m") and is_complete(f"{name}-controls") else name
        if is_complete(experiment):
            measure = "bits per byte over the pass, lower is better"
            yield _line(label, measure, names, language_models.BASELINE, load(experiment).results, "loss", "lower")


def _continual_lines() -> Iterable[Line]:
    for name, tasks in CONTINUAL.items():
        for condition in CONDITIONS if is_complete(name) else ():
            results = load(name).results.where(condition=condition)
            label = f"{tasks}, {condition}"
            yield _line(label, "online accuracy, %", NAMES, continual.BASELINE, results, "accuracy", "higher")


def _stream_lines() -> Iterable[Line]:
    for name, label in STREAMS.items():
        label = f"{STREAM_PREFIX}{label}"
        if is_complete(f"rates-{name}-controls"):
            results = load(f"rates-{name}-controls").results
            yield _line(label, "GAUC, %", NAMES, "Adam", results, MAIN_METRIC, "higher", evidence.POINTS)
        elif is_complete(f"rates-{name}"):
            row = find_row(f"rates-{name}", f"{MAIN}: {OWN}")
            differences = {CADAM: difference_of(row, evidence.POINTS)}
            yield Line(label, "GAUC, %", evidence.POINTS * row.values["Adam"], differences)


def _line(
    study: str,
    measure: str,
    names: Mapping[str, str],
    baseline: str,
    results: Results,
    metric: str,
    better: Better,
    scale: float = 1.0,
) -> Line:
    """Return the line of a study from the results of all arms; `names` has the names of the arms in the results."""
    of_baseline = RateCurve.of(results, baseline, metric, better)
    curves = {
        arm: RateCurve.of(results, name, metric, better) for arm, name in names.items() if results.where(optimizer=name)
    }
    compared = {arm: compare_at_best_rates(curve, of_baseline) for arm, curve in curves.items()}
    differences = {arm: _scaled(comparison.difference, scale) for arm, comparison in compared.items()}
    from_controls = {
        arm: _scaled(compare_at_best_rates(curves[CADAM], curve).difference, scale)
        for arm, curve in curves.items()
        if arm != CADAM
    }
    return Line(study, measure, scale * compared[CADAM].baseline_mean, differences, from_controls, better)


def _scaled(interval: Interval, scale: float) -> Interval:
    return Interval(scale * interval.mean, scale * interval.low, scale * interval.high, interval.count)


def table() -> list[str]:
    """Return the table, with a dash for an arm that a study does not have."""
    text = table_header("study", "measure", "Adam", *(f"{arm}, minus Adam" for arm in ARMS))
    for line in lines():
        cells = [format_interval(line.differences[arm]) if arm in line.differences else "–" for arm in ARMS]
        text.append(table_row(line.study, line.measure, f"{line.adam:.2f}", *cells))
    return text


def missing() -> list[str]:
    """Say in which studies the table has dashes, and why."""
    studies = lines()
    lacking = [line for line in studies if len(line.differences) < len(ARMS)]
    if not lacking:
        return ["Every row has all control arms."]
    text = [f"{len(lacking)} of {len(studies)} rows have dashes instead of control arms."]
    if partly := sum(bool(line.from_controls) for line in lacking):
        text.append(f"{partly} {'rows lack' if partly > 1 else 'row lacks'} only {LONG}, which was not run there.")
    without = [line.study for line in lacking if not line.from_controls]
    kinds = {study: kind for study in without for start, kind in ON_GPU.items() if study.startswith(start)}
    if kinds:
        other = any(line.from_controls and line.study.startswith(tuple(ON_GPU)) for line in studies)
        rows, verbs = ("rows", ("need", "were")) if len(kinds) > 1 else ("row", ("needs", "was"))
        text.append(
            f"The {len(kinds)} {'other ' if other else ''}{rows} of {join_words(list(dict.fromkeys(kinds.values())))} "
            f"{verbs[0]} a GPU and {verbs[1]} run before the control arms were built."
        )
    if models := [study for study in without if study in LANGUAGE_MODELS.values()]:
        text.append(f"No control arms were run for {join_words(models)}, which need a GPU.")
    if streams := [study.removeprefix(STREAM_PREFIX) for study in without if study.startswith(STREAM_PREFIX)]:
        several = len(streams) > 1
        subject = "rows" if several else "row"
        reason = "take long and were not run; their" if several else "takes long and was not run; its"
        ready = "commands are ready" if several else "command is ready"
        text.append(f"The {subject} of {join_words(streams)} {reason} [{ready}](paper.md#ready-and-not-run).")
    return [" ".join(text)]


def answer() -> list[str]:
    """Summarize the studies that have control arms: how often each arm differs clearly from Adam, and CAdam from it.

    The counts are corrected for the number of comparisons of the same kind: those with Adam, and those with CAdam.
    """
    studies = [line for line in lines() if line.from_controls]
    with_adam = sum(len(line.differences) for line in studies)
    with_cadam = sum(len(line.from_controls) for line in studies)
    text = [
        f"{len(studies)} studies have control arms. Clear differences after correction for {with_adam} comparisons "
        f"with Adam and {with_cadam} with CAdam, and in parentheses without correction:",
        "",
        *table_header(
            "arm",
            "studies",
            "better than Adam",
            "worse than Adam",
            "CAdam better than this arm",
            "CAdam worse than this arm",
        ),
    ]
    for arm in ARMS:
        of_arm = [line for line in studies if arm in line.differences]
        from_adam = [(line.differences[arm], line.better) for line in of_arm]
        from_cadam = [(line.from_controls[arm], line.better) for line in of_arm if arm in line.from_controls]
        cells = [_count(from_adam, with_adam, side) for side in (1, -1)]
        cells += [_count(from_cadam, with_cadam, side) if from_cadam else "" for side in (1, -1)]
        text.append(table_row(arm, str(len(of_arm)), *cells))
    text += ["", "The studies with a difference that is clear after correction:", ""]
    better = {arm: _clear_studies(studies, arm, with_adam, from_cadam=False) for arm in ARMS}
    text += [f"- {arm} better than Adam: {names}" for arm, names in better.items()]
    ahead = {arm: _clear_studies(studies, arm, with_cadam, from_cadam=True) for arm in ARMS if arm != CADAM}
    return text + [f"- CAdam better than {arm}: {names}" for arm, names in ahead.items()]


def _clear_studies(studies: Iterable[Line], arm: str, among: int, *, from_cadam: bool) -> str:
    """List the studies in which an arm is clearly better than Adam, or CAdam is clearly better than the arm."""
    names = []
    for line in studies:
        difference = (line.from_controls if from_cadam else line.differences).get(arm)
        if difference is not None and _count([(difference, line.better)], among, 1).startswith("1"):
            names.append(line.study.removeprefix(STREAM_PREFIX))
    return "; ".join(names) or "none"


def _count(differences: Iterable[tuple[Interval, Better]], among: int, side: int) -> str:
    """Count clear differences in favor of the treatment (`side` 1) or baseline (-1), after and before correction."""
    signed = [(difference, side if better == "higher" else -side) for difference, better in differences]
    on_side = [difference for difference, direction in signed if direction * sign(difference) > 0]
    significant = sum(is_significant_among(difference, among) for difference in on_side)
    return f"{significant} ({len(on_side)})"
