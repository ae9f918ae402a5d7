"""The sequence of tasks: each permutes the labels or the pixels of the images, and shows some images once.

A network that learns the tasks in turn meets a sudden shift at the start of each. If it learns late tasks worse than
early ones, it has lost plasticity (Dohare et al. 2024, https://doi.org/10.1038/s41586-024-07711-7).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cadam.statistics.intervals import Array

LABELS, PIXELS = "permuted labels", "permuted pixels"
CONDITIONS = (LABELS, PIXELS)


class Tasks(NamedTuple):
    """The tasks of one run, with one entry per task.

    Attributes:
        examples: Numbers of the images, of shape (tasks, steps, batch).
        pixels: The pixel that is shown at each position, of shape (tasks, pixels).
        labels: The label that each class gets, of shape (tasks, classes).
    """

    examples: Array
    pixels: Array
    labels: Array


def build(
    condition: str, seed: int, *, tasks: int, steps: int, batch: int, images: int, pixels: int, classes: int
) -> Tasks:
    """Draw the tasks of a seed. Runs with the same seed see the same tasks, whatever their optimizer and rate.

    Args:
        condition: What each task permutes, one of `CONDITIONS`.
        seed: The seed.
        tasks: Number of tasks.
        steps: Number of steps per task.
        batch: Number of images per step.
        images: Number of images of the data set. An image appears at most once in a task.
        pixels: Number of values of an image.
        classes: Number of classes.

    Raises:
        ValueError: If the condition is unknown, or a task has more examples than there are images.
    """
    if condition not in CONDITIONS:
        raise ValueError(f"the conditions are {', '.join(CONDITIONS)}, got {condition!r}")
    if steps * batch > images:
        raise ValueError(f"a task has {steps * batch} examples, but there are only {images} images")
    random = np.random.default_rng([seed, CONDITIONS.index(condition)])

    def permutations(length: int, permutes: bool) -> Array:
        rows = [random.permutation(length) if permutes else np.arange(length) for _ in range(tasks)]
        return np.stack(rows).astype(np.int32)

    examples = np.stack([random.choice(images, (steps, batch), replace=False) for _ in range(tasks)])
    return Tasks(
        examples.astype(np.int32), permutations(pixels, condition == PIXELS), permutations(classes, condition == LABELS)
    )
