"""Training in JAX: the runs of an arm are one compiled program, vectorized over rates, seeds and conditions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch

from cadam.statistics.intervals import Array

from ..images import data
from . import tasks
from .arms import ARMS
from .optimizers import build

PROBE = 256
"""Number of images by which inactive units are counted."""


@dataclass(frozen=True)
class Task:
    """The configuration that all runs of one program share."""

    arm: str
    data: str
    hidden: int
    tasks: int
    steps: int
    batch: int
    precision: str
    """Precision of matrix products, a name of `jax.default_matmul_precision`."""
    pool: int = 1
    """Side of the squares of pixels whose mean the network sees as one pixel."""


@dataclass(frozen=True)
class Run:
    """The condition, learning rate and seed by which a run differs from the other runs of its program."""

    condition: str
    lr: float
    seed: int


@dataclass(frozen=True)
class Record:
    """The measurements of a run, with one entry per task.

    Attributes:
        accuracy: Share of images whose label the network predicted before it learned from them.
        loss: Mean cross-entropy of these predictions.
        inactive: Share of hidden units that are 0 for all of 256 images, at the end of the task.
    """

    accuracy: Array
    loss: Array
    inactive: Array


@lru_cache(maxsize=1)
def _images(name: str, pool: int) -> tuple[Any, Any, Array, Array]:
    """Return pixels and labels on JAX's device, and mean and standard deviation of each pixel's channel."""
    images = data.load(name, torch.device("cpu"))
    # The images are not pooled all at once, because floats take four times the memory of bytes.
    parts = images.train.split(5000)  # type: ignore[no-untyped-call]
    pooled = torch.cat([torch.nn.functional.avg_pool2d(part.float(), pool).round().byte() for part in parts])
    pixels = pooled.flatten(1).numpy()
    per_channel = pixels.shape[1] // images.channels
    mean, std = (np.repeat(values.numpy(), per_channel) for values in (images.mean, images.std))
    return jnp.asarray(pixels), jnp.asarray(images.train_labels.numpy().astype(np.int32)), mean, std


def initial_params(key: Any, sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Return the weights of a network with ReLU units (He et al. 2015, https://arxiv.org/abs/1502.01852)."""
    keys = jax.random.split(key, len(sizes) - 1)
    return [
        {"weight": jax.random.normal(k, (inputs, outputs)) * jnp.sqrt(2 / inputs), "bias": jnp.zeros(outputs)}
        for k, inputs, outputs in zip(keys, sizes[:-1], sizes[1:], strict=True)
    ]


def forward(params: list[dict[str, Any]], x: Any) -> tuple[Any, list[Any]]:
    """Return the logits of a batch, and the values of the hidden units of each layer."""
    hidden = []
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["weight"] + layer["bias"])
        hidden.append(x)
    return x @ params[-1]["weight"] + params[-1]["bias"], hidden


def train(
    sequence: tasks.Tasks, lr: Any, seed: Any, pixels: Any, labels: Any, mean: Any, std: Any, *, task: Task
) -> tuple[Any, Any, Any]:
    """Train one network on all tasks; return accuracy, loss and the share of inactive units of each task."""
    weight_key, mask_key = jax.random.split(jax.random.key(seed))
    start = initial_params(weight_key, (pixels.shape[1], task.hidden, task.hidden, sequence.labels.shape[1]))
    optimizer = build(task.arm, lr, mask_key)
    pull = ARMS[task.arm].pull

    def show(examples: Any, order: Any) -> Any:
        return ((pixels[examples].astype(jnp.float32) - mean) / std)[:, order]

    def loss_of(params: Any, x: Any, y: Any) -> tuple[Any, Any]:
        logits, _ = forward(params, x)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
        return loss, (logits.argmax(-1) == y).mean()

    def step(carry: Any, examples: Any, of_task: tasks.Tasks) -> tuple[Any, Any]:
        params, state = carry
        y = of_task.labels[labels[examples]]
        (loss, accuracy), grads = jax.value_and_grad(loss_of, has_aux=True)(params, show(examples, of_task.pixels), y)
        if pull:
            grads = jax.tree.map(lambda grad, param, initial: grad + pull * (param - initial), grads, params, start)
        updates, state = optimizer.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), (accuracy, loss)

    def learn(carry: Any, of_task: tasks.Tasks) -> tuple[Any, Any]:
        carry, (accuracy, loss) = jax.lax.scan(partial(step, of_task=of_task), carry, of_task.examples)
        _, hidden = forward(carry[0], show(of_task.examples.reshape(-1)[:PROBE], of_task.pixels))
        inactive = jnp.concatenate([(values == 0).all(0) for values in hidden]).mean()
        return carry, (accuracy.mean(), loss.mean(), inactive)

    _, measured = jax.lax.scan(learn, (start, optimizer.init(start)), sequence)
    return measured  # type: ignore[no-any-return]


@partial(jax.jit, static_argnames="task")
def _train_all(sequences: Any, lrs: Any, seeds: Any, *images: Any, task: Task) -> Any:
    return jax.vmap(partial(train, task=task), in_axes=(0, 0, 0, None, None, None, None))(
        sequences, lrs, seeds, *images
    )


def compute(task: Task, runs: Sequence[Run]) -> list[Record]:
    """Compute all runs of an arm at once.

    Args:
        task: The configuration that all runs share.
        runs: Their conditions, learning rates and seeds.
    """
    images = _images(task.data, task.pool)
    count, pixels = images[0].shape
    classes = int(images[1].max()) + 1
    shape = {"tasks": task.tasks, "steps": task.steps, "batch": task.batch}
    sequences = [
        tasks.build(run.condition, run.seed, **shape, images=count, pixels=pixels, classes=classes) for run in runs
    ]
    stacked = tasks.Tasks(*(np.stack(parts) for parts in zip(*sequences, strict=True)))
    lrs, seeds = np.array([run.lr for run in runs], np.float32), np.array([run.seed for run in runs], np.uint32)
    with jax.default_matmul_precision(task.precision):
        measured = _train_all(stacked, lrs, seeds, *images, task=task)
    by_run = zip(*(np.asarray(values) for values in measured), strict=True)
    return [Record(accuracy, loss, inactive) for accuracy, loss, inactive in by_run]
