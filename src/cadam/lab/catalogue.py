"""The experiments by name. Each is imported only when asked for."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from importlib import import_module

from .experiment import Experiment

PLACES = {
    "fig-shift": "cadam.lab.numerical:FIG_SHIFT",
    "fig-noise": "cadam.lab.numerical:FIG_NOISE",
    "fig-no-noise": "cadam.lab.numerical:FIG_NO_NOISE",
    "sweep-lr": "cadam.lab.numerical:SWEEP_LR",
    "sweep-cycle": "cadam.lab.numerical:SWEEP_CYCLE",
    "fig-sudden": "cadam.lab.images.study:FIG_SUDDEN",
    "fig-sudden-detail": "cadam.lab.images.study:FIG_SUDDEN_DETAIL",
    "fig-continuous": "cadam.lab.images.study:FIG_CONTINUOUS",
    "fig-image-noise": "cadam.lab.images.study:FIG_IMAGE_NOISE",
    "fig-sudden-resnet": "cadam.lab.images.study:FIG_SUDDEN_RESNET",
    "fig-continuous-resnet": "cadam.lab.images.study:FIG_CONTINUOUS_RESNET",
    "fig-image-noise-resnet": "cadam.lab.images.study:FIG_IMAGE_NOISE_RESNET",
    "fig-sudden-densenet": "cadam.lab.images.study:FIG_SUDDEN_DENSENET",
    "fig-continuous-densenet": "cadam.lab.images.study:FIG_CONTINUOUS_DENSENET",
    "fig-image-noise-densenet": "cadam.lab.images.study:FIG_IMAGE_NOISE_DENSENET",
    "tab-ablation-images": "cadam.lab.images.study:TAB_ABLATION",
    "tab-image-rates": "cadam.lab.images.study:TAB_RATES",
    "tab-image-rates-resnet": "cadam.lab.images.study:TAB_RATES_RESNET",
    "tab-criteo": "cadam.lab.ctr.study:TAB_CRITEO",
    "tab-criteo-noise": "cadam.lab.ctr.study:TAB_CRITEO_NOISE",
    "tab-ablation-criteo": "cadam.lab.ctr.study:TAB_ABLATION_CRITEO",
    "stream-criteo": "cadam.lab.ctr.study:STREAM_CRITEO",
    "theorem": "cadam.lab.theory:THEOREM",
    "demo-stream": "cadam.lab.stream:DEMO_STREAM",
    "ab-flights": "cadam.lab.ab.study:FLIGHTS",
    "ab-movielens": "cadam.lab.ab.study:MOVIELENS",
    "ab-electricity": "cadam.lab.ab.study:ELECTRICITY",
    "ab-forest": "cadam.lab.ab.study:FOREST",
}
"""In the order of the paper: module and name of each `Experiment`."""


class UnknownExperimentError(ValueError):
    """A name that is no experiment's."""


def find(name: str) -> Experiment:
    """The experiment of this name."""
    if name not in PLACES:
        close = difflib.get_close_matches(name.lower(), PLACES, n=1, cutoff=0.5)
        advice = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(PLACES)}"
        raise UnknownExperimentError(f"no experiment is called {name!r}; {advice}")
    module, attribute = PLACES[name].split(":")
    experiment: Experiment = getattr(import_module(module), attribute)
    return experiment


def select(names: Iterable[str]) -> list[Experiment]:
    """The experiments of these names, each once; `all` stands for every one."""
    listed = [known for name in names for known in (PLACES if name == "all" else [name])]
    return [find(name) for name in dict.fromkeys(listed)]
