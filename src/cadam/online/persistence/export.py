"""Using a trained model: load it from a checkpoint to predict, or export it to files that need only torch."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...atomic_write import replace_file, write_with
from ...checkpoint_files import check_like, expect_valid_content
from ...printable import printable
from ..data.events import Array, Batch
from ..data.schema import Schema
from ..data.validation import check_arguments
from ..models.frozen_ids import frozen_ids
from ..models.inputs import cast_features, feature_dtype
from ..models.model_file import UsageError
from ..run_config import MODEL_FILE, SCHEMA_FILE, model_builder, read_ready_made_model
from .checkpoints import read_newest
from .deltas import DeltaError, apply_to_weights, is_applied, read_delta, version_of

logger = logging.getLogger("cadam.online")


class ScoringModel(nn.Module):
    """Wraps a model so that it takes encoded features as one dict and returns one float32 score per event."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.feature_dtype = model, feature_dtype(model)

    def forward(self, features: dict[str, Tensor]) -> Tensor:
        """Compute the scores of a batch of events."""
        scores: Tensor = self.model(**cast_features(features, self.feature_dtype))
        return scores.reshape(next(iter(features.values())).shape[0]).float()


def serving_schema(schema: Schema) -> Schema:
    """Copy a schema without id, user and time, which a prediction does not need."""
    return replace(schema, id=None, user=None, time=None)


@dataclass(frozen=True)
class LoadedModel:
    """A model that is ready to predict, with the schema that encodes events for it. `load_model` creates it."""

    model: nn.Module
    """The model in evaluation mode, with the weights of the checkpoint."""
    schema: Schema
    path: Path
    """The checkpoint that was loaded."""
    events: int
    """The number of events that the learner had seen when it wrote the checkpoint."""
    _versions: list[str] = field(default_factory=list, init=False, repr=False, compare=False)
    """The version of the weights, once it is known."""
    _logged_reasons: list[str] = field(default_factory=list, init=False, repr=False, compare=False)
    """The reason of the first rejected event, once it was logged."""

    @property
    def device(self) -> torch.device:
        """The device that the model is on."""
        return next((param.device for param in self.model.parameters()), torch.device("cpu"))

    @property
    def version(self) -> str:
        """The version of the weights: a hash of their values."""
        if not self._versions:
            self._versions.append(version_of(self.model.state_dict()))
        return self._versions[0]

    def apply_delta(self, path: Path | str) -> LoadedModel:
        """Update the weights of this model with a delta, which `cadam export --since` has written.

        The model is changed in place, so it must not predict at the same time.

        Args:
            path: the delta.

        Returns:
            The updated model, which shares the weights with this one.

        Raises:
            DeltaError: if the delta is damaged or incomplete, or does not start from the version of this model. Nothing
                has changed then.
        """
        delta = read_delta(path)
        if is_applied(delta, self.version, path):
            return self
        state = self.model.state_dict()
        changed = apply_to_weights(state, delta)
        resized = {name for name, value in changed.items() if value.shape != state[name].shape}
        stored = {*dict(self.model.named_parameters()), *dict(self.model.named_buffers())}
        if resized & stored:
            raise DeltaError(f"{path} has other shapes of {', '.join(sorted(resized & stored))}; nothing was changed")
        others = {name: changed.get(name, value) for name, value in state.items() if name not in stored}
        try:
            self.model.load_state_dict(others, strict=False)
        except RuntimeError as error:
            raise DeltaError(f"{path} does not fit the model: {error}") from error
        for name in changed.keys() & stored:
            state[name].copy_(changed[name])
        updated = replace(self, events=int(delta["events"]))
        updated._versions.append(delta["version"])
        self._versions.clear()
        return updated

    def encode(self, records: Sequence[Mapping[str, Any]], *, text: bool = False) -> Batch:
        """Encode raw events as features of the model. Label, id, user and time are ignored.

        Args:
            records: one dict per event.
            text: whether numbers are strings, as in a CSV file.

        Returns:
            The encoded events, and the rejected ones with a reason: those that do not match the schema, and those that
            have none of the features.

        Raises:
            TypeError: if `records` is not a list of dicts.
        """
        return serving_schema(self.schema).encode(records, text=text)

    def scores(self, features: Mapping[str, Array]) -> Array:
        """Compute the scores of encoded features: logits, if the model was trained with the log loss."""
        tensors = {name: torch.from_numpy(np.array(values)).to(self.device) for name, values in features.items()}
        with torch.inference_mode():
            scores: Array = ScoringModel(self.model)(tensors).cpu().numpy()
        return scores

    def predict(self, records: Sequence[Mapping[str, Any]], *, text: bool = False) -> Array:
        """Compute the scores of raw events.

        An event that does not match the schema is rejected: its score is nan. The reason of the first rejected event is
        logged as a warning, once per loaded model; `encode` returns the reasons of all rejected events.

        Args:
            records: a list with one dict per event, also for one event.
            text: whether numbers are strings, as in a CSV file.

        Returns:
            One score per event, nan for rejected events.

        Raises:
            TypeError: if `records` is not a list of dicts.
        """
        batch = self.encode(records, text=text)
        if batch.rejected and not self._logged_reasons:
            first = batch.rejected[0]
            self._logged_reasons.append(first.reason)
            logger.warning(
                "rejected events have the score nan, here %d of %d. The first, at index %s: %s. Later ones are not "
                "logged; LoadedModel.encode returns the reasons",
                len(batch.rejected),
                len(records),
                first.where,
                printable(first.reason),
            )
        scores = np.full(len(records), np.nan, dtype=np.float32)
        rejected = {int(event.where) for event in batch.rejected}
        if batch.events is not None:
            scores[[row for row in range(len(records)) if row not in rejected]] = self.scores(batch.events.features)
        return scores


def load_model(
    folder: Path | str,
    model: nn.Module | str | None = None,
    schema: Schema | None = None,
    *,
    device: torch.device | str | None = None,
) -> LoadedModel:
    """Load the model of the newest good checkpoint in a folder, to which a learner may still be writing.

    `cadam run` writes the name of a ready-made model and its schema to the folder. Give `model` if the model is your
    own: a folder never makes this function import a Python file. Give `schema` too if a `Learner` of your own has
    written the checkpoints.

    Args:
        folder: the checkpoint folder of a run.
        model: a new model of the same class, or FILE.py:FUNCTION.
        schema: the schema of the events.
        device: the device to predict on, whichever device the model was trained on (default: the CPU for a ready-made
            model, and the device of `model` for your own).

    Raises:
        FileNotFoundError: if the folder does not exist.
        DamagedCheckpointError: if no checkpoint can be read.
        ValueError: if the model or the schema is missing, if the model is FILE.py:FUNCTION and `model` is not given,
            or if the weights belong to another model.

    Example::

        model = load_model("runs/clicks")
        scores = model.predict([{"item": "a17", "price": 0.5}])
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder with checkpoints")
    if schema is None and (folder / SCHEMA_FILE).is_file():
        schema = Schema.read(folder / SCHEMA_FILE)
    settings: dict[str, Any] = {}
    if model is None:
        model, settings = read_ready_made_model(folder) or (None, {})
    if schema is None or model is None:
        raise UsageError(
            f"{folder} lacks {MODEL_FILE} or {SCHEMA_FILE}, which `cadam run` writes: give load_model a model and a "
            "schema too"
        )
    if isinstance(model, str):
        model = model_builder(model, schema, settings)[0]()
    else:
        check_arguments(model, schema, type(model).__name__)
    path, state = read_newest(folder)
    try:
        with expect_valid_content(path):
            model.load_state_dict(state["model"])
            events = state["counts"]["events"]
            check_like(events, 0, "events")
    except RuntimeError as error:
        raise ValueError(f"the weights in {path} belong to another model: {error}") from error
    return LoadedModel(model.to(device).eval(), schema, path, events)


def export(loaded: LoadedModel, path: Path | str) -> list[Path]:
    """Write a model for serving: model.pt2 (torch.export), model.pt (state dict) and model.schema.json.

    The exported model takes any number of events, in a process that imports only torch::

        model = torch.export.load("model.pt2").module()
        scores = model({"item": torch.tensor([3, 5]), "price": torch.tensor([0.5, 1.0]).double()})

    It runs on the device that `loaded` is on. The state dict has tensors on the CPU.

    Args:
        loaded: the model.
        path: the path of model.pt2; the other files are written beside it.

    Returns:
        The paths of the three files.

    Raises:
        RuntimeError: if torch.export cannot trace the model, for example because its control flow depends on values.
            The state dict and the schema are then written nevertheless.
    """
    path = Path(path)
    weights_path, schema_path = path.with_suffix(".pt"), path.with_suffix(".schema.json")
    schema_text = json.dumps(serving_schema(loaded.schema).settings(), indent=2, ensure_ascii=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    weights = {name: value.cpu() for name, value in loaded.model.state_dict().items()}
    write_with(weights_path, lambda new: torch.save(weights, new))
    replace_file(schema_path, schema_text.encode())
    batch = torch.export.Dim("batch")
    examples = {name: _example(kind).to(loaded.device) for name, kind in loaded.schema.kinds.items()}
    shapes = ({name: {0: batch} for name in examples},)
    try:
        with frozen_ids(loaded.model), _without_gradients(loaded.model):
            program = _trace(ScoringModel(loaded.model).eval(), examples, shapes)
    except Exception as error:  # tracing runs the code of the model, which may raise anything
        raise RuntimeError(
            f"torch.export does not support this model ({type(error).__name__}: {str(error).splitlines()[0]}); "
            f"{weights_path} has its weights, and cadam.online.load_model can predict with it"
        ) from error
    write_with(path, lambda new: _save(program, new, schema_text))
    return [path, weights_path, schema_path]


@contextmanager
def _without_gradients(model: nn.Module) -> Iterator[None]:
    """Take the gradients from a model while it is traced: strict mode copies them, and warns about sparse ones."""
    gradients = [(param, param.grad) for param in model.parameters()]
    model.zero_grad()
    try:
        yield
    finally:
        for param, gradient in gradients:
            param.grad = gradient


def _trace(model: nn.Module, examples: Any, shapes: Any) -> Any:
    """Export a model, in strict mode if possible.

    Strict mode analyzes the bytecode and keeps the batch size dynamic where the model calls `len`. The other mode runs
    the model in Python and also supports code that cannot be analyzed.
    """
    try:
        return torch.export.export(model, (examples,), dynamic_shapes=shapes, strict=True)
    except Exception:
        return torch.export.export(model, (examples,), dynamic_shapes=shapes, strict=False)


def _example(kind: Any) -> Tensor:
    """Create values of two events; torch.export would treat a batch size of 1 as a constant."""
    shape = (2, kind.length) if kind.length else (2,)
    return torch.zeros(shape, dtype=torch.float64 if kind.name == "number" else torch.int64)


def _save(program: Any, path: Path, schema_text: str) -> None:
    with open(path, "wb") as file:
        torch.export.save(program, file, extra_files={"schema.json": schema_text})
