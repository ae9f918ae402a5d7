"""What a command line says to learn from: the data, its schema, given or inferred, and the model."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from ..atomic_write import replace_file
from . import models
from .data.inference import ColumnOptions, InferredSchema, infer_schema, take_sample
from .data.kind import Kind
from .data.schema import Schema
from .data.sources import resolve_uri
from .data.sources.records import list_duplicates
from .models.model_file import LOG_LOSS, UsageError, load, model_of
from .models.networks import WIDTH
from .persistence.checkpoints import Checkpoints
from .training_step import Loss

SCHEMA, MODEL = "schema.json", "model.json"
"""Files of a folder that say what its model is and what it takes."""
DEFAULT_MODEL = "deepfm"
MODELS = f"{', '.join(models.MODELS)}, or FILE.py:FUNCTION for one of yours (default: {DEFAULT_MODEL})"


def data_of(options: argparse.Namespace) -> str:
    """The URI of the data."""
    if (options.place is None) == (options.data is None):
        raise UsageError("give the data once: a file, a folder of Parquet or a URI, as in cadam run clicks.csv")
    return options.data if options.place is None else resolve_uri(options.place)


def stem(uri: str) -> str:
    """A short name for the data."""
    name = uri.partition("?")[0].rstrip("/").rpartition("/")[2].rpartition(":")[2]
    return re.sub(r"[^\w-]+", "-", re.sub(r"(\.gz)?$|\.\w+(\.gz)?$", "", name)).strip("-") or "stream"


def wishes_of(options: argparse.Namespace) -> ColumnOptions:
    ignore = tuple(name.strip() for name in (options.ignore or "").split(",") if name.strip())
    return ColumnOptions(options.label, options.user, options.time, options.id, ignore)


def inferred(uri: str, options: argparse.Namespace) -> InferredSchema:
    """The schema of the data, from a sample."""
    taken, wishes = take_sample(uri), wishes_of(options)
    if twice := list_duplicates(name for name in taken.names if name not in wishes.ignore):
        raise UsageError(
            f"{shown(uri)} has more than one column {twice}: give each a name of its own, or leave them out with "
            "--ignore"
        )
    return infer_schema(taken, wishes, shown(uri))


def shown(uri: str) -> str:
    """The path of a file, or a stream's address without settings and passwords."""
    return re.sub("//[^/@]*@", "//", uri.partition("?")[0]) if "://" in uri else uri.partition(":")[2] or uri


def show(found: InferredSchema) -> None:
    print("\n".join(found.lines(max(80, min(160, shutil.get_terminal_size().columns)))), flush=True)


def amended(schema: Schema, options: argparse.Namespace) -> Schema:
    """A schema with what the options say of label, user, time, id and columns to leave out."""
    wishes = wishes_of(options)
    given = {name: value for name in ("label", "user", "time", "id") if (value := getattr(wishes, name)) is not None}
    features = {name: kind for name, kind in schema.features.items() if name not in wishes.ignore}
    return replace(schema, features=features, **given)


@dataclass(frozen=True)
class Given:
    """What is learnt from, and with which model."""

    uri: str
    schema: Schema
    model: str
    build: Callable[[], nn.Module]
    loss: Loss
    settings: Mapping[str, Any]
    """Of a ready-made model: its width and hidden layers, where they were given."""
    found: InferredSchema | None = None
    """What the schema was inferred by, if it was."""

    def write(self, folder: Path) -> None:
        """What `read` finds in the folder."""
        self.schema.write(folder / SCHEMA, **({"ignored": self.found.ignored()} if self.found else {}))
        text = json.dumps({"model": absolute(self.model), **self.settings}, indent=2)
        replace_file(folder / MODEL, f"{text}\n".encode())

    def other_than(self, folder: Path) -> str:
        """How the model that a folder notes differs from this, in words; empty if it does not."""
        try:
            noted = noted_model(folder)
        except UsageError:  # what it was is not known
            return ""
        if noted is None:
            return ""
        before, now = _described(*noted), _described(absolute(self.model), self.settings)
        return "" if before == now else f"it is of {before}; you gave {now}"


def noted_model(folder: Path) -> tuple[str, dict[str, Any]] | None:
    """The model that a folder notes, and its settings; None if it notes none."""
    path = folder / MODEL
    if not path.is_file():
        return None
    try:
        settings = json.loads(path.read_text("utf-8"))
        return str(settings.pop("model")), settings
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{path} is damaged: it should say how the model is built, as in "
            f'{{"model": "{DEFAULT_MODEL}"}}. Give `cadam run` the --model, --width and --hidden of the first run '
            f"(--model {DEFAULT_MODEL} if it had none): that writes the file anew"
        ) from error


def _described(model: str, settings: Mapping[str, Any]) -> str:
    """A model with its settings, for people."""
    if ":" in model:
        return model
    hidden = f" and hidden layers {','.join(map(str, settings['hidden']))}" if settings.get("hidden") else ""
    return f"{model} with width {settings.get('width') or WIDTH}{hidden}"


def absolute(place: str) -> str:
    """A model as it is found from any folder: its file with the whole path."""
    file, _, function = place.rpartition(":")
    return f"{Path(file).resolve()}:{function}" if file else place


def builder(place: str, schema: Schema, settings: Mapping[str, Any]) -> tuple[Callable[[], nn.Module], Loss]:
    """What builds the model of a name or FILE.py:FUNCTION, and its loss."""
    if ":" in place:
        module, build = load(place)
        return lambda: model_of(place, build, schema), getattr(module, "loss", LOG_LOSS)
    width, hidden = settings.get("width"), settings.get("hidden")
    return lambda: models.build(place, schema, width=width, hidden=hidden), LOG_LOSS


def read(options: argparse.Namespace, folder: Path | None = None, quiet: bool = False) -> Given:
    """What the options ask for. Model and schema are those of the folder where it has them and options do not say."""
    uri = data_of(options)
    model, settings = _model(options, folder)
    if ":" not in model and model not in models.MODELS:
        raise UsageError(f"no model is called {model!r}; there are {MODELS}")
    schema, found = _schema(options, uri, model, folder)
    if folder is not None:
        check_same(schema, folder, in_order=":" not in model)
    if found is not None and not quiet:
        show(found)
    build, loss = builder(model, schema, settings)
    return Given(uri, schema, model, build, loss, settings, found)


def check_same(schema: Schema, folder: Path, in_order: bool) -> None:
    """That weights in the folder, if there are any, were learnt with these features and this label.

    A ready-made model has its rows `in_order` of the features; one of yours is given them by name.
    """
    if not (folder / SCHEMA).is_file() or not Checkpoints.has_any(folder):
        return
    saved = Schema.read(folder / SCHEMA)
    before, now = ({name: _alike(kind) for name, kind in one.kinds.items()} for one in (saved, schema))
    differ = [f"{name} was {saved.features[name]}" for name in before if name not in now]
    differ += [f"{name} is new" for name in now if name not in before]
    both = [name for name in before if name in now]
    differ += [
        f"{name} was {saved.features[name]} and is {schema.features[name]}"
        for name in both
        if before[name] != now[name]
    ]
    if in_order and not differ and list(before) != list(now):
        differ.append(f"the order of the features was {', '.join(before)} and is {', '.join(now)}")
    if saved.label != schema.label:
        differ.append(f"the label was {saved.label} and is {schema.label}")
    if differ:
        raise UsageError(
            f"the state in {folder} was learnt with another schema ({folder / SCHEMA}): {'; '.join(differ)}. Give "
            "that schema, or another --checkpoint to start anew"
        )


def _alike(kind: Kind) -> Kind:
    """The kind as far as weights depend on it: a number has the same whether or not it may be missing."""
    return replace(kind, optional=False) if kind.name == "number" else kind


def _model(options: argparse.Namespace, folder: Path | None) -> tuple[str, dict[str, Any]]:
    given: dict[str, Any] = {}
    if options.width is not None:
        given["width"] = options.width
    if options.hidden is not None:
        try:
            given["hidden"] = [int(size) for size in options.hidden.split(",")]
        except ValueError:
            raise UsageError(f"--hidden should be sizes of layers, as in 64,32; got {options.hidden!r}") from None
    if any(size < 1 for size in (given.get("width", 1), *given.get("hidden", ()))):
        raise UsageError("--width and --hidden must be at least 1")
    noted = None if options.model is not None or folder is None else noted_model(folder)
    model, saved = noted or (options.model or DEFAULT_MODEL, {})
    _check_parts(model, given)
    return model, {**saved, **given}


def _check_parts(model: str, given: Mapping[str, Any]) -> None:
    """That a model has the parts whose sizes are given."""
    if ":" in model and given:
        raise UsageError(f"--width and --hidden are for ready-made models; {model} is your own")
    for option, part, has in (("width", "embeddings", "embeds"), ("hidden", "hidden layers", "has_hidden")):
        if option in given and model in models.MODELS and not getattr(models.MODELS[model], has):
            those = ", ".join(name for name, kind in models.MODELS.items() if getattr(kind, has))
            raise UsageError(
                f"--{option} is for models with {part} ({those}), and {model} has none: leave it out, or give another "
                "--model"
            )


def _differ(schema: Schema, options: argparse.Namespace) -> list[str]:
    """Options that say otherwise than a schema, with what it says. The form of a column may be left out."""
    wishes, differ = wishes_of(options), []
    for name in ("label", "user", "time", "id"):
        wanted, there = getattr(wishes, name), getattr(schema, name)
        if wanted is not None and wanted != there and (name == "label" or wanted != (there or "").partition(":")[0]):
            differ.append(f"--{name} is {wanted}, and there it is {there or 'not named'}")
    differ += [f"--ignore has {name}, and there it is a feature" for name in wishes.ignore if name in schema.features]
    return differ


def _schema(
    options: argparse.Namespace, uri: str, model: str, folder: Path | None
) -> tuple[Schema, InferredSchema | None]:
    if options.schema is not None:
        return amended(Schema.read(options.schema), options), None
    if ":" in model and isinstance(schema := getattr(load(model)[0], "SCHEMA", None), Schema):
        return amended(schema, options), None
    if folder is not None and (folder / SCHEMA).is_file():
        schema = Schema.read(folder / SCHEMA)
        if differ := _differ(schema, options):
            raise UsageError(
                f"{folder / SCHEMA} says otherwise than the command: {'; '.join(differ)}. Leave that out, edit the "
                "file, or give another --checkpoint to start anew"
            )
        print(f"the schema is {folder / SCHEMA}", file=sys.stderr)
        return schema, None
    if ":" in model and options.label is None:
        raise UsageError(
            f"{model.rpartition(':')[0]} has no SCHEMA, and --schema is not given; with --label the schema is inferred"
        )
    found = inferred(uri, options)
    return found.schema, found
