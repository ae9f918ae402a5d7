"""Predict a stream by Vowpal Wabbit and river with their defaults, each event before it is learned.

    PYTHON benchmarks/online_peers.py STREAM.vw PREDICTIONS.npz

The Python needs vowpalwabbit, river and NumPy, but neither cadam nor torch. The file of the stream has Vowpal Wabbit's
format: a label (1 or -1), then ``name:value`` for a number and ``name=value`` for a category. `defaults` writes it.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

VOWPAL_WABBIT = {"VW": "", "VW, FTRL": "--ftrl"}
"""The options of Vowpal Wabbit by the name of the learner, beside the logistic loss."""


def predict_by_vowpal_wabbit(stream: Path, options: str) -> Any:
    """Return the progressive predictions of Vowpal Wabbit, as probabilities."""
    import vowpalwabbit

    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "predictions")
        arguments = f"-d {stream} -p {output} --loss_function logistic --link logistic --quiet {options}"
        vowpalwabbit.Workspace(arguments).finish()
        return np.loadtxt(output)


def read_events(stream: Path) -> Iterator[tuple[dict[str, float], dict[str, float], int]]:
    """Yield the numbers, the categories and the label, 0 or 1, of each event."""
    with stream.open() as lines:
        for line in lines:
            label, _, features = line.partition(" | ")
            parts = features.split()
            numbers = {name: float(value) for name, _, value in (part.partition(":") for part in parts if ":" in part)}
            yield numbers, {part: 1.0 for part in parts if ":" not in part}, int(label == "1")


def predict_by_river(stream: Path) -> dict[str, Any]:
    """Return the predictions of river's logistic regression, with its defaults and with FTRL.

    Numbers are standardized and categories are one-hot, as in river's own examples.
    """
    from river import linear_model, optim, preprocessing

    scaler = preprocessing.StandardScaler()
    models = {
        "river": linear_model.LogisticRegression(),
        "river, FTRL": linear_model.LogisticRegression(optimizer=optim.FTRLProximal()),
    }
    predictions: dict[str, list[float]] = {name: [] for name in models}
    for numbers, categories, label in read_events(stream):
        scaler.learn_one(numbers)
        features = {**scaler.transform_one(numbers), **categories}
        for name, model in models.items():
            predictions[name].append(model.predict_proba_one(features)[True])
            model.learn_one(features, bool(label))
    return {name: np.array(values) for name, values in predictions.items()}


if __name__ == "__main__":
    source = Path(sys.argv[1])
    of_vowpal_wabbit = {name: predict_by_vowpal_wabbit(source, options) for name, options in VOWPAL_WABBIT.items()}
    np.savez(sys.argv[2], **of_vowpal_wabbit, **predict_by_river(source))
