"""Use what was learnt: the model of a checkpoint ready to predict, and as files that need torch alone."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...atomic_write import replace_file, write_with
from ...cli.exit_codes import DONE, FAILED, NO_PACKAGE, USAGE
from ..data.events import Array, Batch
from ..data.schema import Schema
from ..data.validation import check_arguments
from ..models.model_file import UsageError
from ..run_config import MODEL, SCHEMA, builder, noted_model
from .checkpoints import DamagedCheckpointError, read

SUMMARY = "Write the model of a checkpoint for serving: with torch.export, as a state dict, and its schema."


# Ready to predict ------------------------------------------------------------------------------------------------


class Scores(nn.Module):
    """A model that takes encoded features as one dict, and gives a score per event as float32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, features: dict[str, Tensor]) -> Tensor:
        scores: Tensor = self.model(**features)
        return scores.reshape(next(iter(features.values())).shape[0]).float()


def for_serving(schema: Schema) -> Schema:
    """The schema of events that nothing is to be learnt from: they need no id, user and time."""
    return replace(schema, id=None, user=None, time=None)


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to predict, with the schema that encodes events for it."""

    model: nn.Module
    """In evaluation mode, with the weights of the checkpoint."""
    schema: Schema
    path: Path
    """The checkpoint."""
    events: int
    """How many events had been seen when it was written."""

    def encode(self, records: Sequence[Mapping[str, Any]], *, text: bool = False) -> Batch:
        """Raw events as the model's features; those that are not of the schema are rejected, with a reason.

        So is one that has none of the features. Label, id, user and time are not needed and not looked at. With `text`,
        numbers are written as text, as in CSV.
        """
        return self.schema.encode(records, text=text)

    def scores(self, features: Mapping[str, Array]) -> Array:
        """Scores of encoded features, logits with the log loss: what the learner's `predict` would give."""
        device = next((param.device for param in self.model.parameters()), torch.device("cpu"))
        tensors = {name: torch.from_numpy(np.array(values)).to(device) for name, values in features.items()}
        with torch.inference_mode():
            found: Array = Scores(self.model)(tensors).cpu().numpy()
        return found

    def predict(self, records: Sequence[Mapping[str, Any]], *, text: bool = False) -> Array:
        """Scores of raw events; nan for one that is rejected."""
        batch = self.encode(records, text=text)
        found = np.full(len(records), np.nan, dtype=np.float32)
        rejected = {int(one.where) for one in batch.rejected}
        if batch.events is not None:
            found[[row for row in range(len(records)) if row not in rejected]] = self.scores(batch.events.features)
        return found


def load_model(folder: Path | str, model: nn.Module | str | None = None, schema: Schema | None = None) -> LoadedModel:
    """The model of the newest good checkpoint in a folder, which a learner may go on writing to.

    `cadam run` notes in the folder how the model is built and what its schema is. For a learner of your own, or where
    the model's file has moved, give a model, new and of the same class, or FILE.py:FUNCTION; and the schema.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is no folder with checkpoints")
    if schema is None and (folder / SCHEMA).is_file():
        schema = Schema.read(folder / SCHEMA)
    settings: dict[str, Any] = {}
    if model is None:
        model, settings = noted_model(folder) or (None, {})
    if schema is None or model is None:
        raise UsageError(
            f"{folder} lacks {MODEL} or {SCHEMA}, which `cadam run` writes: give load_model a model and a schema too"
        )
    if isinstance(model, str):
        model = builder(model, schema, settings)[0]()
    else:
        check_arguments(model, schema, type(model).__name__)
    path, state = _newest(folder)
    try:
        model.load_state_dict(state["model"])
    except RuntimeError as error:
        raise ValueError(f"the weights in {path} are not of this model: {error}") from error
    return LoadedModel(model.eval(), schema, path, state["counts"]["events"])


def _newest(folder: Path) -> tuple[Path, Any]:
    """The newest good checkpoint; nothing is renamed and nothing locked, since it may be a running learner's."""
    while True:
        files = sorted(folder.glob("checkpoint-*.safetensors"), reverse=True)
        for path in files:
            try:
                return path, read(path)
            except DamagedCheckpointError:
                continue
        if files == sorted(folder.glob("checkpoint-*.safetensors"), reverse=True):  # else a learner has gone on
            raise DamagedCheckpointError(f"none of {len(files)} checkpoints in {folder} is good")


# As files --------------------------------------------------------------------------------------------------------


def export(loaded: LoadedModel, path: Path | str) -> list[Path]:
    """Write model.pt2 (torch.export, any number of events), model.pt (state dict) and model.schema.json.

    In a process that imports torch alone::

        model = torch.export.load("model.pt2").module()
        scores = model({"item": torch.tensor([3, 5]), "price": torch.tensor([0.5, 1.0])})

    A model whose path depends on values cannot be exported: that is a RuntimeError, and the other two files are there.
    """
    path = Path(path)
    state, schema = path.with_suffix(".pt"), path.with_suffix(".schema.json")
    text = json.dumps(for_serving(loaded.schema).settings(), indent=2, ensure_ascii=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_with(state, lambda new: torch.save(loaded.model.state_dict(), new))
    replace_file(schema, text.encode())
    batch = torch.export.Dim("batch")
    examples = {name: _example(kind) for name, kind in loaded.schema.kinds.items()}
    shapes = ({name: {0: batch} for name in examples},)
    model = Scores(loaded.model).eval()
    try:
        program = _traced(model, examples, shapes)
    except Exception as error:  # whatever the model does that cannot be traced
        raise RuntimeError(
            f"torch.export does not take this model ({type(error).__name__}: {str(error).splitlines()[0]}); "
            f"{state} has its weights, and cadam.online.load_model its predictions"
        ) from error
    write_with(path, lambda new: _save(program, new, text))
    return [path, state, schema]


def _traced(model: nn.Module, examples: Any, shapes: Any) -> Any:
    """By the model's code, which lets the number of events be any that is asked for by `len`; else by a call of it."""
    try:
        return torch.export.export(model, (examples,), dynamic_shapes=shapes, strict=True)
    except Exception:  # the code has something that only Python itself can do
        return torch.export.export(model, (examples,), dynamic_shapes=shapes, strict=False)


def _example(kind: Any) -> Tensor:
    """Two events' values of a kind; one would be taken for a constant."""
    shape = (2, kind.length) if kind.length else (2,)
    return torch.zeros(shape, dtype=torch.float32 if kind.name == "number" else torch.int64)


def _save(program: Any, new: Path, schema: str) -> None:
    with open(new, "wb") as file:
        torch.export.save(program, file, extra_files={"schema.json": schema})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `cadam export`."""
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the --checkpoint of a run, which may go on")
    parser.add_argument("output", type=Path, metavar="MODEL.pt2", help="MODEL.pt and MODEL.schema.json go beside it")
    parser.add_argument("--model", metavar="FILE:FUNCTION", help="what builds the model, if its file has moved")
    parser.add_argument("--schema", type=Path, metavar="FILE", help="the schema, if the folder has none")


def run(options: argparse.Namespace) -> int:
    if options.output.suffix != ".pt2":
        print(f"cadam export: {options.output} should end in .pt2, as torch's exported programs do", file=sys.stderr)
        return USAGE
    try:
        schema = Schema.read(options.schema) if options.schema else None
        loaded = load_model(options.folder, options.model, schema)
    except (ValueError, RuntimeError, OSError, ImportError) as error:
        print(f"cadam export: {error}", file=sys.stderr)
        return NO_PACKAGE if isinstance(error, ImportError) else USAGE
    try:
        paths = export(loaded, options.output)
    except (RuntimeError, OSError) as error:
        print(f"cadam export: {error}", file=sys.stderr)
        return FAILED
    print(f"{loaded.path.name}, {loaded.events:,} events: {', '.join(map(os.fspath, paths))}")
    return DONE
