"""A small recommender in Keras on a stream of clicks, with CAdam, on the backend that KERAS_BACKEND names.

    KERAS_BACKEND=jax python examples/keras_recommender.py
    KERAS_BACKEND=torch python examples/keras_recommender.py --optimizer Adam

The clicks are simulated: users and items have tastes, tastes drift, and a tenth of the labels are flipped. Each batch
is scored before it is learned, so the printed loss is that of unseen events.
"""

from __future__ import annotations

import argparse
from typing import Any

import keras
import numpy as np

import cadam.keras

WIDTH = 8


def batch(step: int, size: int, rows: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Return users, items and whether they clicked, which depend only on the step."""
    rng = np.random.default_rng(step)
    user, item = ((rng.random(size) ** 3 * rows).astype("int32") for _ in range(2))  # few are busy
    taste = np.sin(user * 12.9898 + item * 78.233 % 7 + step / 300)
    clicked = (taste > 0) ^ (rng.random(size) < 0.1)
    return [user, item], clicked.astype("float32")[:, None]


def build(rows: int) -> Any:
    user, item = (keras.Input((), dtype="int32", name=name) for name in ("user", "item"))
    of_user, of_item = (keras.layers.Embedding(rows, WIDTH)(ids) for ids in (user, item))
    x = keras.layers.Concatenate()([of_user, of_item, keras.layers.Multiply()([of_user, of_item])])
    x = keras.layers.Dense(32, activation="relu")(x)
    return keras.Model([user, item], keras.layers.Dense(1, activation="sigmoid")(x))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rows", type=int, default=1_000, help="rows of each table")
    parser.add_argument("--optimizer", default="CAdam", help="a class of cadam.keras, such as CAdam or Adam")
    parser.add_argument("--save", help="a .keras file to write at the end")
    arguments = parser.parse_args()

    keras.utils.set_random_seed(0)
    model = build(arguments.rows)
    model.compile(optimizer=getattr(cadam.keras, arguments.optimizer)(1e-2), loss="binary_crossentropy")
    recent = []
    for step in range(1, arguments.steps + 1):
        recent.append(float(model.train_on_batch(*batch(step, arguments.batch, arguments.rows))))
        if step % 100 == 0 or step == arguments.steps:
            aligned = model.optimizer.alignment
            print(f"step {step:5d}   loss {np.mean(recent):.4f}   aligned {aligned:.3f}")
            recent = []
            model.reset_metrics()
    if arguments.save:
        model.save(arguments.save)


if __name__ == "__main__":
    main()
