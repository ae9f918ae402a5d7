"""Training of the language models with all text on the device.

On CUDA the model is compiled, a CUDA graph replays the whole training step, and several runs proceed concurrently. On
the CPU the same functions are called eagerly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from cadam.statistics.intervals import Array

from ..harness.cuda_runs import Captured
from . import optimizers, stream
from .corpus import Corpus
from .model import BYTES, GPT, SIZES

Schedule = Literal["constant", "cosine"]
WARM_UP_SHARE = 0.02
"""Share of the steps over which the learning rate rises linearly from zero."""
FINAL_RATE = 0.1
"""The share of the learning rate that a cosine schedule ends at."""
MAX_GRAD_NORM = 1.0


@dataclass(frozen=True)
class Task:
    """The configuration of a training run."""

    model: str
    optimizer: str
    lr: float
    seed: int
    condition: str
    schedule: Schedule
    steps: int
    batch: int
    context: int
    bfloat16: bool
    """Whether matrix products are computed in bfloat16."""
    compiled: bool


@dataclass(frozen=True)
class Record:
    """The measurements of a run, in bits per byte.

    Attributes:
        loss: Loss on the true targets of each batch, before the step that learns from it.
        held_out: Loss after the last step on the held-out text of each domain.
    """

    loss: Array
    held_out: Array


_texts: dict[tuple[str, str], Tensor] = {}
"""The training text of each corpus on each device, which all runs share."""


def losses(model: nn.Module, inputs: Tensor, shown: Tensor, true: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean loss on the targets that are trained on, and on the true targets."""
    logits = model(inputs).float().view(-1, BYTES)
    training = F.cross_entropy(logits, shown.reshape(-1))
    return training, F.cross_entropy(logits.detach(), true.reshape(-1))


@cache
def compiled_losses() -> Callable[[nn.Module, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return the compiled `losses`, which all runs share."""
    return torch.compile(losses, dynamic=False)


def learning_rates(lr: float, steps: int, schedule: Schedule) -> Array:
    """Return the learning rate of each step: a linear warm-up, then constant or a cosine down to a tenth."""
    warm_up = max(1, int(WARM_UP_SHARE * steps))
    step = np.arange(steps)
    factors = np.minimum(1.0, (step + 1) / warm_up)
    if schedule == "cosine":
        progress = np.clip((step - warm_up) / max(1, steps - warm_up), 0, 1)
        factors *= FINAL_RATE + (1 - FINAL_RATE) * (1 + np.cos(math.pi * progress)) / 2
    return (lr * factors).astype(np.float32)


class Run:
    """One training run. Each call of `advance` performs one training step; the call after the last step evaluates.

    Args:
        task: The configuration.
        corpus: The text.
        device: Where the run is computed.
    """

    def __init__(self, task: Task, corpus: Corpus, device: torch.device) -> None:
        self.task, self.corpus, self.device = task, corpus, device
        examples = stream.build(
            corpus, task.condition, task.seed, context=task.context, batch=task.batch, steps=task.steps
        )
        self.noise = examples.noise
        self.model = GPT(SIZES[task.model], task.context, task.seed).to(device)
        key = (corpus.name, str(device))
        if key not in _texts:
            _texts[key] = torch.from_numpy(examples.text).to(device)
        self._text = _texts[key]
        self._starts = torch.from_numpy(examples.starts).to(device)
        self._rates = torch.from_numpy(learning_rates(task.lr, task.steps, task.schedule)).to(device)
        self._lr = torch.zeros((), device=device)
        self.optimizer = optimizers.build(task.optimizer, self.model, self._lr, task.seed)
        self._generator = torch.Generator(device).manual_seed(task.seed)
        self._positions = torch.arange(task.context + 1, device=device)
        self._step = torch.zeros(1, dtype=torch.int64, device=device)
        self._loss = torch.zeros(task.steps, device=device)
        self._losses = compiled_losses() if task.compiled else losses
        self._train: Callable[[], None] = self.train_step
        self.stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self.stream.wait_stream(torch.cuda.current_stream(device))
            generators = [self._generator]
            if isinstance(self.optimizer, optimizers.MaskedAdamW) and self.optimizer.generator is not None:
                generators.append(self.optimizer.generator)
            self._train = Captured(self.train_step, self.stream, generators)
        self._held_out = np.full(len(corpus.held_out), math.nan)
        self._actions = self._iterate()

    def train_step(self) -> None:
        """Perform one training step, from selecting the batch to recording the loss, entirely on the device."""
        step = self._step
        self.optimizer.zero_grad(set_to_none=True)
        self._lr.copy_(self._rates.index_select(0, step).squeeze(0))
        starts = self._starts.index_select(0, step).squeeze(0)
        examples = self._text[starts.unsqueeze(1) + self._positions].long()
        inputs, true = examples[:, :-1], examples[:, 1:].contiguous()
        training, measured = self._losses_of(inputs.contiguous(), self._corrupt(true), true)
        training.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM, foreach=True)
        self.optimizer.step()
        self._loss.index_copy_(0, step, measured.view(1))
        step.add_(1)

    def _corrupt(self, true: Tensor) -> Tensor:
        """Replace a share of the targets by random bytes."""
        if not self.noise:
            return true
        random = torch.rand(true.shape, device=self.device, generator=self._generator)
        replacement = torch.randint(BYTES, true.shape, device=self.device, generator=self._generator)
        return torch.where(random < self.noise, replacement, true)

    def _losses_of(self, inputs: Tensor, shown: Tensor, true: Tensor) -> tuple[Tensor, Tensor]:
        # Autocast must not cache the cast weights: a replayed graph would not update the cached copies.
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.task.bfloat16, cache_enabled=False):
            return self._losses(self.model, inputs, shown, true)

    @torch.no_grad()
    def evaluate(self) -> Array:
        """Return the loss on the held-out text of each domain, in bits per byte."""
        context, batch = self.task.context, self.task.batch
        means = []
        for text in self.corpus.held_out.values():
            values = torch.from_numpy(text.copy()).to(self.device).long()
            count = (len(values) - 1) // context
            total = torch.zeros((), device=self.device)
            for first in range(0, count, batch):
                starts = torch.arange(first, min(first + batch, count), device=self.device) * context
                examples = values[starts.unsqueeze(1) + self._positions]
                with torch.autocast(self.device.type, torch.bfloat16, enabled=self.task.bfloat16):
                    logits = self.model(examples[:, :-1]).float()
                total += F.cross_entropy(logits.view(-1, BYTES), examples[:, 1:].reshape(-1), reduction="sum")
            means.append(total.item() / (count * context) / math.log(2))
        return np.array(means)

    def advance(self) -> bool:
        """Perform the next training step or the evaluation; return False at the end of the run."""
        return next(self._actions, False)

    def _iterate(self) -> Iterator[bool]:
        for _ in range(self.task.steps):
            self._train()
            yield True
        self.synchronize()
        self._held_out = self.evaluate()

    def synchronize(self) -> None:
        """Wait until the device has finished all work of this run."""
        if self.stream is not None:
            self.stream.synchronize()

    def record(self) -> Record:
        """Return the measurements of a finished run."""
        self.synchronize()
        return Record(self._loss.cpu().numpy() / math.log(2), self._held_out)

    def release(self) -> None:
        """Free the memory of the captured CUDA graph and of the gradients."""
        if isinstance(self._train, Captured) and self._train.graph is not None:
            self._train.graph.reset()
        self.optimizer.zero_grad(set_to_none=True)
