"""The list of experiments. The module of an experiment is imported only when the experiment is requested."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from importlib import import_module

from .harness.experiment import Experiment

EXPERIMENTS = {
    "fig-shift": "cadam_paper.numerical:FIG_SHIFT",
    "fig-noise": "cadam_paper.numerical:FIG_NOISE",
    "fig-no-noise": "cadam_paper.numerical:FIG_NO_NOISE",
    "sweep-lr": "cadam_paper.numerical:SWEEP_LR",
    "sweep-cycle": "cadam_paper.numerical:SWEEP_CYCLE",
    "fig-sudden": "cadam_paper.images.study:FIG_SUDDEN",
    "fig-sudden-detail": "cadam_paper.images.study:FIG_SUDDEN_DETAIL",
    "fig-continuous": "cadam_paper.images.study:FIG_CONTINUOUS",
    "fig-image-noise": "cadam_paper.images.study:FIG_IMAGE_NOISE",
    "fig-sudden-resnet": "cadam_paper.images.study:FIG_SUDDEN_RESNET",
    "fig-continuous-resnet": "cadam_paper.images.study:FIG_CONTINUOUS_RESNET",
    "fig-image-noise-resnet": "cadam_paper.images.study:FIG_IMAGE_NOISE_RESNET",
    "fig-sudden-densenet": "cadam_paper.images.study:FIG_SUDDEN_DENSENET",
    "fig-continuous-densenet": "cadam_paper.images.study:FIG_CONTINUOUS_DENSENET",
    "fig-image-noise-densenet": "cadam_paper.images.study:FIG_IMAGE_NOISE_DENSENET",
    "fig-rates": "cadam_paper.images.rates:FIG_RATES",
    "fig-rates-amsgrad": "cadam_paper.images.rates:FIG_RATES_AMSGRAD",
    "fig-rates-sgdm": "cadam_paper.images.rates:FIG_RATES_SGDM",
    "fig-rates-resnet": "cadam_paper.images.rates:FIG_RATES_RESNET",
    "fig-rates-controls": "cadam_paper.images.rates:FIG_RATES_CONTROLS",
    "fig-rates-resnet-controls": "cadam_paper.images.rates:FIG_RATES_RESNET_CONTROLS",
    "fig-rates-lion": "cadam_paper.images.rates:FIG_RATES_LION",
    "fig-rates-radam": "cadam_paper.images.rates:FIG_RATES_RADAM",
    "tab-ablation-images": "cadam_paper.images.study:TAB_ABLATION",
    "tab-image-rates": "cadam_paper.images.study:TAB_RATES",
    "tab-image-rates-resnet": "cadam_paper.images.study:TAB_RATES_RESNET",
    "tab-criteo": "cadam_paper.ctr.study:TAB_CRITEO",
    "tab-criteo-noise": "cadam_paper.ctr.study:TAB_CRITEO_NOISE",
    "tab-ablation-criteo": "cadam_paper.ctr.study:TAB_ABLATION_CRITEO",
    "fig-rates-clicks": "cadam_paper.ctr.rates:FIG_RATES_CLICKS",
    "fig-rates-clicks-controls": "cadam_paper.ctr.rates:FIG_RATES_CLICKS_CONTROLS",
    "stream-criteo": "cadam_paper.ctr.study:STREAM_CRITEO",
    "lm-mixed": "cadam_paper.language_models.study:MIXED",
    "lm-shift": "cadam_paper.language_models.study:SHIFT",
    "lm-noise": "cadam_paper.language_models.study:NOISE",
    "lm-cosine": "cadam_paper.language_models.study:COSINE",
    "lm-mixed-10m": "cadam_paper.language_models.study:MIXED_10M",
    "lm-shift-10m": "cadam_paper.language_models.study:SHIFT_10M",
    "lm-mixed-10m-controls": "cadam_paper.language_models.study:MIXED_10M_CONTROLS",
    "lm-shift-10m-controls": "cadam_paper.language_models.study:SHIFT_10M_CONTROLS",
    "lm-mixed-50m": "cadam_paper.language_models.study:MIXED_50M",
    "lm-shift-50m": "cadam_paper.language_models.study:SHIFT_50M",
    "continual": "cadam_paper.continual.study:CONTINUAL",
    "continual-small": "cadam_paper.continual.study:CONTINUAL_SMALL",
    "masking": "cadam_paper.masking:MASKING",
    "theorem": "cadam_paper.theory:THEOREM",
    "demo-stream": "cadam_paper.simulated_clicks:DEMO_STREAM",
    "ab-flights": "cadam_paper.real_streams:FLIGHTS",
    "ab-movielens": "cadam_paper.real_streams:MOVIELENS",
    "ab-electricity": "cadam_paper.real_streams:ELECTRICITY",
    "ab-forest": "cadam_paper.real_streams:FOREST",
    "ab-movielens-1m": "cadam_paper.real_streams:MOVIELENS_1M",
    "ab-retrosheet": "cadam_paper.real_streams:RETROSHEET",
    "rates-flights": "cadam_paper.real_streams:FLIGHTS_RATES",
    "rates-movielens": "cadam_paper.real_streams:MOVIELENS_RATES",
    "rates-electricity": "cadam_paper.real_streams:ELECTRICITY_RATES",
    "rates-forest": "cadam_paper.real_streams:FOREST_RATES",
    "rates-movielens-1m": "cadam_paper.real_streams:MOVIELENS_1M_RATES",
    "rates-retrosheet": "cadam_paper.real_streams:RETROSHEET_RATES",
    "rates-flights-controls": "cadam_paper.real_streams:FLIGHTS_CONTROLS",
    "rates-movielens-controls": "cadam_paper.real_streams:MOVIELENS_CONTROLS",
    "rates-electricity-controls": "cadam_paper.real_streams:ELECTRICITY_CONTROLS",
    "rates-forest-controls": "cadam_paper.real_streams:FOREST_CONTROLS",
    "rates-movielens-1m-controls": "cadam_paper.real_streams:MOVIELENS_1M_CONTROLS",
    "rates-retrosheet-controls": "cadam_paper.real_streams:RETROSHEET_CONTROLS",
}
"""The location of each `Experiment` as "module:attribute", in the order of the paper."""


class UnknownExperimentError(ValueError):
    """Raised for a name that is not in the catalog."""


def find(name: str) -> Experiment:
    """Return the experiment with this name.

    Raises:
        UnknownExperimentError: If there is no such experiment. The message suggests a similar name.
    """
    if name not in EXPERIMENTS:
        close = difflib.get_close_matches(name.lower(), EXPERIMENTS, n=1, cutoff=0.5)
        advice = f"did you mean {close[0]!r}?" if close else f"the experiments are {', '.join(EXPERIMENTS)}"
        raise UnknownExperimentError(f"there is no experiment {name!r}; {advice}")
    module, attribute = EXPERIMENTS[name].split(":")
    experiment: Experiment = getattr(import_module(module), attribute)
    return experiment


def select(names: Iterable[str]) -> list[Experiment]:
    """Return the experiments with these names without duplicates; the name `all` stands for every experiment."""
    selected: list[str] = []
    for name in names:
        selected += EXPERIMENTS if name == "all" else [name]
    return [find(name) for name in dict.fromkeys(selected)]
