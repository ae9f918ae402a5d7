"""The training step of a model that `torch.compile` compiles."""

from __future__ import annotations

import os
import shutil
import sys
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from .models.networks import Linear
from .training_step import Loss, TrainingStep


class CompiledStep(TrainingStep):
    """Calls a compiled model. The optimizer and the loss are not compiled.

    Compiling takes some seconds, at the first batch. The compiled code works for all batch sizes, so that its results
    do not depend on the sizes of earlier batches, and a resumed run equals an uninterrupted one to the bit.

    Args:
        model: a model of the user's own.
        optimizer: updates the parameters of the model.
        loss: computes the mean loss from scores and labels.

    Raises:
        ValueError: if the model is a ready-made one.
        RuntimeError: if `torch.compile` lacks a compiler.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss) -> None:
        if isinstance(model, Linear):
            raise ValueError("ready-made models have compiled code of their own: compile is for your own models")
        super().__init__(model, optimizer, loss)
        if (problem := find_missing_compiler(self._device.type)) is not None:
            raise RuntimeError(f"torch.compile needs {problem}; or learn without compile")
        self._compiled = torch.compile(model, dynamic=True)

    @property
    def description(self) -> str:
        """A description of how the model is trained."""
        return "in batches, compiled by torch.compile"

    def _compute_scores(self, features: dict[str, Tensor]) -> Tensor:
        scores: Tensor = self._compiled(**features)
        return scores


def find_missing_compiler(device: str) -> str | None:
    """Return what `torch.compile` lacks on a type of device, and what to do about it, or None."""
    if device == "cuda" and find_spec("triton") is None:
        return "Triton for a model on CUDA: pip install triton"
    command = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if device != "cuda" and shutil.which(command) is None:
        return f"a C++ compiler, and {command} was not found: install one, or set CXX to its name"
    return None
