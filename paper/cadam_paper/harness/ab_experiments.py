"""An A/B study and its learning-rate curves as experiments of the harness."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from . import ab_controls, ab_rates
from .ab_analysis import EXPLANATION, summarize
from .ab_figures import study_figures
from .ab_study import Study, run_length, run_specs
from .experiment import Experiment, Plan, Scale
from .results import Results, RunSpec


def comparison_experiment(
    study: Study, quick_events: int, title: str, shows: str, seconds: Mapping[Scale, float], **fields: Any
) -> Experiment:
    """Return the experiment that compares the arms of a study.

    Args:
        study: The study at full scale.
        quick_events: The number of events that the quick scale uses.
        title: The title of the experiment.
        shows: One sentence about what the experiment shows.
        seconds: The expected duration by scale.
        **fields: Further fields of the experiment.
    """
    return Experiment(
        name=study.name,
        title=title,
        shows=shows,
        measure=EXPLANATION,
        run_specs=partial(_comparison_specs, study, quick_events),
        summary=partial(summarize, study),
        figures=partial(study_figures, study),
        weight=run_length,
        seconds=seconds,
        **fields,
    )


def rates_experiment(
    study: Study, quick_events: int, title: str, shows: str, seconds: Mapping[Scale, float], **fields: Any
) -> Experiment:
    """Return the experiment that runs the arms of a study at every learning rate.

    Some of its runs are also runs of `comparison_experiment`, which has the same arguments. They are computed once.
    """
    return Experiment(
        name=study.name.replace("ab-", "rates-", 1),
        title=title,
        shows=shows,
        measure=EXPLANATION,
        run_specs=partial(_rate_specs, study, quick_events),
        summary=partial(ab_rates.summary, study),
        figures=partial(ab_rates.figures, study),
        seconds=seconds,
        **fields,
    )


def controls_experiment(
    study: Study, quick_events: int, title: str, shows: str, seconds: Mapping[Scale, float], **fields: Any
) -> Experiment:
    """Return the experiment that compares the arms of a study with the control arms.

    It has the same arguments as `rates_experiment`, whose runs it shares.
    """
    return Experiment(
        name=f"{study.name.replace('ab-', 'rates-', 1)}-controls",
        title=title,
        shows=shows,
        measure=EXPLANATION,
        run_specs=partial(_control_specs, study, quick_events),
        summary=ab_controls.summary,
        figures=ab_controls.figures,
        seconds=seconds,
        **fields,
    )


def _comparison_specs(study: Study, quick_events: int, plan: Plan, results: Results) -> Sequence[RunSpec]:
    return run_specs(_scaled(study, quick_events, plan), plan.seeds, results)


def _rate_specs(study: Study, quick_events: int, plan: Plan, results: Results) -> Sequence[RunSpec]:
    return ab_rates.run_specs(_scaled(study, quick_events, plan), plan.seeds, results)


def _control_specs(study: Study, quick_events: int, plan: Plan, results: Results) -> Sequence[RunSpec]:
    return ab_controls.run_specs(_scaled(study, quick_events, plan), plan.seeds, results)


def _scaled(study: Study, quick_events: int, plan: Plan) -> Study:
    return replace(study, events=quick_events) if plan.scale == "quick" else study
