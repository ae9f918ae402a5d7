"""Using a trained model: load it from a checkpoint to predict, or export it to files that need only torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...atomic_write import replace_file, write_with
from ..data.events import Array, Batch
from ..data.schema import Schema
from ..data.validation import check_arguments
from ..models.model_file import UsageError
from ..run_config import MODEL_FILE, SCHEMA_FILE, model_builder, read_model_file
from .checkpoints import read_newest


class ScoringModel(nn.Module):
    """Wraps a model so that it takes encoded features as one dict and returns one float32 score per event."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, features: dict[str, Tensor]) -> Tensor:
        """Compute the scores of a batch of events."""
        scores: Tensor = self.model(**features)
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

    def encode(self, records: Sequence[Mapping[str, Any]], *, text: bool = False) -> Batch:
        """Encode raw events as features of the model. Label, id, user and time are ignored.

        Args:
            records: one dict per event.
            text: whether numbers are strings, as in a CSV file.

        Returns:
            The encoded events, and the rejected ones with a reason: those that do not match the schema, and those that
            have none of the features.
        """
        return self.schema.encode(records, text=text)

    def scores(self, features: Mapping[str, Array]) -> Array:
        """Compute the scores of encoded features: logits, if the model was trained with the log loss."""
        device = next((param.device for param in self.model.parameters()), torch.device("cpu"))
        tensors = {name: torch.from_numpy(np.array(values)).to(device) for name, values in features.items()}
        with torch.inference_mode():
            scores: Array = ScoringModel(self.model)(tensors).cpu().numpy()
        return scores

    def predict(self, records: Sequence[Mapping[str, Any]], *, text: bool = False) -> Array:
        """Compute the scores of raw events.

        Args:
            records: one dict per event.
            text: whether numbers are strings, as in a CSV file.

        Returns:
            One score per event, nan for rejected events.
        """
        batch = self.encode(records, text=text)
        scores = np.full(len(records), np.nan, dtype=np.float32)
        rejected = {int(event.where) for event in batch.rejected}
        if batch.events is not None:
            scores[[row for row in range(len(records)) if row not in rejected]] = self.scores(batch.events.features)
        return scores


def load_model(folder: Path | str, model: nn.Module | str | None = None, schema: Schema | None = None) -> LoadedModel:
    """Load the model of the newest good checkpoint in a folder, to which a learner may still be writing.

    `cadam run` writes to the folder how the model is built, and its schema. `model` and `schema` are needed only for a
    checkpoint of your own `Learner`, or if the Python file of the model has moved.

    Args:
        folder: the checkpoint folder of a run.
        model: a new model of the same class, or FILE.py:FUNCTION.
        schema: the schema of the events.

    Raises:
        FileNotFoundError: if the folder does not exist.
        DamagedCheckpointError: if no checkpoint can be read.
        ValueError: if the model or the schema is missing, or if the weights belong to another model.

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
        model, settings = read_model_file(folder) or (None, {})
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
        model.load_state_dict(state["model"])
    except RuntimeError as error:
        raise ValueError(f"the weights in {path} belong to another model: {error}") from error
    return LoadedModel(model.eval(), schema, path, state["counts"]["events"])


def export(loaded: LoadedModel, path: Path | str) -> list[Path]:
    """Write a model for serving: model.pt2 (torch.export), model.pt (state dict) and model.schema.json.

    The exported model takes any number of events, in a process that imports only torch::

        model = torch.export.load("model.pt2").module()
        scores = model({"item": torch.tensor([3, 5]), "price": torch.tensor([0.5, 1.0])})

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
    write_with(weights_path, lambda new: torch.save(loaded.model.state_dict(), new))
    replace_file(schema_path, schema_text.encode())
    batch = torch.export.Dim("batch")
    examples = {name: _example(kind) for name, kind in loaded.schema.kinds.items()}
    shapes = ({name: {0: batch} for name in examples},)
    try:
        program = _trace(ScoringModel(loaded.model).eval(), examples, shapes)
    except Exception as error:  # tracing runs the code of the model, which may raise anything
        raise RuntimeError(
            f"torch.export does not support this model ({type(error).__name__}: {str(error).splitlines()[0]}); "
            f"{weights_path} has its weights, and cadam.online.load_model can predict with it"
        ) from error
    write_with(path, lambda new: _save(program, new, schema_text))
    return [path, weights_path, schema_path]


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
    return torch.zeros(shape, dtype=torch.float32 if kind.name == "number" else torch.int64)


def _save(program: Any, path: Path, schema_text: str) -> None:
    with open(path, "wb") as file:
        torch.export.save(program, file, extra_files={"schema.json": schema_text})
