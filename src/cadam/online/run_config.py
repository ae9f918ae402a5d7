"""The configuration of a run: its data, schema and model, from the command line and from the files of earlier runs."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..atomic_write import replace_file
from ..checkpoint_files import expect_valid_content
from ..printable import printable, shell_word
from . import models
from .data import inference
from .data.conversion import MAX_NUMBER
from .data.inference import ColumnOptions, InferredSchema, take_sample
from .data.kind import Kind
from .data.schema import Schema
from .data.sources import resolve_uri
from .data.sources.records import list_duplicates
from .device import select_device
from .models.model_file import LOG_LOSS, UsageError, build_from_function, is_log_loss, is_model_file, load_function
from .models.networks import DEFAULT_WIDTH
from .persistence.checkpoints import list_checkpoints, read_newest_header
from .training_step import Loss

SCHEMA_FILE, MODEL_FILE = "schema.json", "model.json"
"""Files in the checkpoint folder that describe the features and the model."""
SCHEMA_KEY = "schema"
"""The key of the position of a source in a checkpoint under which the settings of the schema are saved."""
DEFAULT_MODEL = "deepfm"
MODEL_HELP = f"{', '.join(models.MODELS)}, or FILE.py:FUNCTION for your own (default: {DEFAULT_MODEL})"


@dataclass(frozen=True)
class RunConfig:
    """The data, the schema and the model of a run. `read_config` creates it from the options of a command."""

    uri: str
    schema: Schema
    model: str
    """The name of a ready-made model, or FILE.py:FUNCTION."""
    build_model: Callable[[], nn.Module]
    """Builds a new model."""
    loss: Loss
    settings: Mapping[str, Any]
    """The width and the hidden layers of a ready-made model, if they were given."""
    inferred: InferredSchema | None = None
    """The result of the schema inference, if the schema was inferred."""
    device: torch.device | None = None
    """The device of the model; None for the CPU, or where the function of a user's own model puts it."""

    @property
    def has_own_model(self) -> bool:
        """Whether the model is a user's own, given as FILE.py:FUNCTION."""
        return is_model_file(self.model)

    def write(self, folder: Path) -> None:
        """Write the schema and the model to a checkpoint folder, where `read_config` finds them."""
        ignored = self.left_out(folder)
        self.schema.write(folder / SCHEMA_FILE, **({"ignored": ignored} if ignored else {}))
        text = json.dumps({"model": absolute_location(self.model), **self.settings}, indent=2)
        replace_file(folder / MODEL_FILE, f"{text}\n".encode())

    def left_out(self, folder: Path) -> dict[str, str]:
        """Return the columns that the inferred schema leaves out, with the reasons.

        If the schema was inferred by an earlier run, they are a note in the schema of the checkpoint folder.
        """
        if self.inferred is not None:
            return self.inferred.ignored()
        try:
            content = json.loads((folder / SCHEMA_FILE).read_text(encoding="utf-8"))
            return {name: reason for name, reason in content["ignored"].items() if name not in self.schema.features}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}  # there is no such file, or it has no such note

    def describe_difference(self, folder: Path) -> str:
        """Describe how the model of a checkpoint folder differs from this one; empty if it does not."""
        try:
            saved = read_model_file(folder)
        except UsageError:  # the file is damaged, so the saved model is unknown
            return ""
        if saved is None:
            return ""
        saved_text, text = _describe(*saved), _describe(absolute_location(self.model), self.settings)
        return "" if saved_text == text else f"it belongs to {saved_text}; you gave {text}"


def read_config(options: argparse.Namespace, folder: Path | None = None, quiet: bool = False) -> RunConfig:
    """Create the configuration of a run from the options of a command.

    Args:
        options: the data, schema and model options of a command. They are not changed.
        folder: the checkpoint folder. Its model and schema are used unless the options say otherwise.
        quiet: whether an inferred schema is not printed.

    Raises:
        UsageError: if the options are invalid, or contradict the files in the folder.
    """
    uri, device = data_uri(options), select_device(options.device)
    model, settings = choose_model(options, folder)
    if not is_model_file(model) and model not in models.MODELS:
        raise UsageError(f"no model is called {model!r}; there are {MODEL_HELP}")
    schema, inferred = _choose_schema(options, uri, model, folder)
    schema.check_expiry()
    if folder is not None:
        check_same_schema(schema, folder, in_order=not is_model_file(model))
    if inferred is not None and not quiet:
        print_inferred(inferred)
    build, loss = model_builder(model, schema, settings, device)
    if not is_log_loss(loss) and (schema.lowest, schema.highest) == (0, 1):
        schema = replace(schema, lowest=-MAX_NUMBER, highest=MAX_NUMBER)  # The default is for the log loss.
    return RunConfig(uri, schema, model, build, loss, settings, inferred, device)


# Data and schema -------------------------------------------------------------------------------------------------


def data_uri(options: argparse.Namespace) -> str:
    """Return the URI of the data that the options name.

    Raises:
        UsageError: if the data is given twice or not at all.
    """
    if (options.place is None) == (options.data is None):
        raise UsageError("give the data once: a file, a folder of Parquet or a URI, as in cadam run clicks.csv")
    return resolve_uri(options.data if options.place is None else options.place)


def short_name(uri: str) -> str:
    """Derive a short name for the data, for folders and titles."""
    name = uri.partition("?")[0].rstrip("/").rpartition("/")[2].rpartition(":")[2]
    return re.sub(r"[^\w-]+", "-", re.sub(r"(\.gz)?$|\.\w+(\.gz)?$", "", name)).strip("-") or "stream"


def displayed_uri(uri: str) -> str:
    """Return the path of a file, or the address of a stream without settings and passwords."""
    return re.sub("//[^/@]*@", "//", uri.partition("?")[0]) if "://" in uri else uri.partition(":")[2] or uri


def _column_options(options: argparse.Namespace) -> ColumnOptions:
    ignore = tuple(name.strip() for name in (options.ignore or "").split(",") if name.strip())
    return ColumnOptions(options.label, options.user, options.time, options.id, ignore, options.ids)


def infer_schema(uri: str, options: argparse.Namespace) -> InferredSchema:
    """Infer the schema of the data from a sample.

    Raises:
        UsageError: if two columns have the same name.
    """
    sample, columns = take_sample(uri), _column_options(options)
    if duplicates := list_duplicates(name for name in sample.names if name not in columns.ignore):
        raise UsageError(
            f"{displayed_uri(uri)} has more than one column {duplicates}: rename them, or leave them out with --ignore"
        )
    return inference.infer_schema(sample, columns, displayed_uri(uri))


def print_inferred(inferred: InferredSchema) -> None:
    """Print an inferred schema with the reasons. A disk that is full is reported, but does not end the command."""
    try:
        print("\n".join(inferred.lines(max(80, min(160, shutil.get_terminal_size().columns)))), flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        print(f"the inferred schema cannot be printed: {error}", file=sys.stderr)


def _choose_schema(
    options: argparse.Namespace, uri: str, model: str, folder: Path | None
) -> tuple[Schema, InferredSchema | None]:
    """Take the schema from --schema, from the model's file, from the checkpoint folder, or infer it."""
    if options.schema is not None:
        return _amend(Schema.read(options.schema), options), None
    if is_model_file(model) and isinstance(schema := getattr(load_function(model)[0], "SCHEMA", None), Schema):
        return _amend(schema, options), None
    if folder is not None and (folder / SCHEMA_FILE).is_file():
        schema = Schema.read(folder / SCHEMA_FILE)
        if contradictions := _find_contradictions(schema, options):
            raise UsageError(
                f"{folder / SCHEMA_FILE} contradicts the command: {'; '.join(contradictions)}. Leave these options "
                f"out, {'' if list_checkpoints(folder) else 'edit the file, '}or give another --checkpoint to start "
                "from scratch"
            )
        print(printable(f"the schema is {folder / SCHEMA_FILE}"), file=sys.stderr)
        return schema, None
    if is_model_file(model) and options.label is None:
        raise UsageError(
            f"{model.rpartition(':')[0]} has no SCHEMA, and --schema is not given; with --label the schema is inferred"
        )
    try:
        inferred = infer_schema(uri, options)
    except inference.CannotInferError as error:
        if getattr(options, "labels", None) is None:
            raise
        advice = "where the labels are another source, --schema names the label, the id and the time"
        raise UsageError(f"{error}; {advice}") from error
    return inferred.schema, inferred


def _amend(schema: Schema, options: argparse.Namespace) -> Schema:
    """Replace label, user, time and id of a schema by those of the options, and leave out ignored columns."""
    columns = _column_options(options)
    roles = {role: getattr(columns, role) for role in ("label", "user", "time", "id")}
    features = {name: kind for name, kind in schema.features.items() if name not in columns.ignore}
    return replace(schema, features=features, **{role: name for role, name in roles.items() if name is not None})


def _find_contradictions(schema: Schema, options: argparse.Namespace) -> list[str]:
    """List options that contradict a saved schema. The format of a time column may be left out."""
    columns, contradictions = _column_options(options), []
    for role in ("label", "user", "time", "id"):
        requested, saved = getattr(columns, role), getattr(schema, role)
        is_same_column = role != "label" and requested == (saved or "").partition(":")[0]
        if requested is not None and requested != saved and not is_same_column:
            contradictions.append(f"--{role} is {requested}, but the file has {saved or 'none'}")
    contradictions += [
        f"--ignore has {name}, which is a feature in the file" for name in columns.ignore if name in schema.features
    ]
    return contradictions


def read_saved_schema(folder: Path) -> Schema | None:
    """Return the schema in the newest checkpoint of a folder, or else in its file; None if there is no checkpoint."""
    if not list_checkpoints(folder):
        return None
    position = read_newest_header(folder).get("source")
    if isinstance(position, Mapping) and SCHEMA_KEY in position:
        with expect_valid_content(f"the schema in the newest checkpoint of {folder}"):
            return Schema(**position[SCHEMA_KEY])
    return Schema.read(folder / SCHEMA_FILE) if (folder / SCHEMA_FILE).is_file() else None


def check_same_schema(
    schema: Schema,
    folder: Path,
    in_order: bool,
    model_only: bool = False,
    complete: Callable[[Schema], Schema] = lambda schema: schema,
) -> None:
    """Check that the checkpoints of a folder were trained with these features, this label, and these other columns.

    Events that wait for their labels or for a training step have the id, the user and the weight of the saved schema,
    and their times are on the clock of its time.

    Args:
        schema: the schema of this run.
        folder: the checkpoint folder.
        in_order: whether the order of the features matters. It does for ready-made models, whose table has the rows of
            the features in order. A user's own model gets the features by name.
        model_only: whether only the model continues, without waiting events: then the other columns may differ.
        complete: adds the columns that a service needs to a schema that does not name them.

    Raises:
        UsageError: if the schemas differ.
    """
    saved = read_saved_schema(folder)
    if saved is None:
        return
    path = folder / SCHEMA_FILE
    is_from_folder = path.is_file() and Schema.read(path) == schema
    saved, schema = complete(saved), complete(schema)
    saved_kinds, kinds = ({name: _comparable(kind) for name, kind in each.kinds.items()} for each in (saved, schema))
    differences = [f"{name} was {saved.features[name]}" for name in saved_kinds if name not in kinds]
    differences += [f"{name} is new" for name in kinds if name not in saved_kinds]
    differences += [
        f"{name} was {saved.features[name]} and is {schema.features[name]}"
        for name in saved_kinds
        if name in kinds and saved_kinds[name] != kinds[name]
    ]
    if in_order and not differences and list(saved_kinds) != list(kinds):
        differences.append(f"the order of the features was {', '.join(saved_kinds)} and is {', '.join(kinds)}")
    if saved.label != schema.label:
        differences.append(f"the label was {saved.label} and is {schema.label}")
    if saved.decimal != schema.decimal:
        differences.append(f"the decimal separator was {saved.decimal} and is {schema.decimal}")
    saved_roles, roles = (
        {role: (name, _comparable(kind)) for role, (name, kind) in each.roles.items()} for each in (saved, schema)
    )
    for role in () if model_only else ("id", "user", "time", "weight"):
        if saved_roles.get(role) != roles.get(role):
            old, new = (getattr(each, role) or "none" for each in (saved, schema))
            differences.append(f"the {role} was {old} and is {new}")
    if not differences:
        return
    problem = "were trained with another schema"
    if is_from_folder:
        raise UsageError(
            f"{path} has been edited, and the checkpoints in {folder} {problem}: {'; '.join(differences)}. Undo the "
            "edit, or give another folder to start from scratch; `cadam migrate` adds, drops and resizes columns"
        )
    raise UsageError(
        f"the checkpoints in {folder} {problem} ({path}): {'; '.join(differences)}. Give that schema, or none, or "
        "another folder to start from scratch"
    )


def _comparable(kind: Kind) -> Kind:
    """Return a kind without the decimal separator, which all kinds of a schema share.

    Optional and required numbers are equal, because they have the same weights.
    """
    return replace(kind, optional=kind.optional and kind.name != "number", decimal=".")


# Models ----------------------------------------------------------------------------------------------------------


def model_builder(
    model: str, schema: Schema, settings: Mapping[str, Any], device: torch.device | None = None
) -> tuple[Callable[[], nn.Module], Loss]:
    """Return a function that builds a model, and the loss of the model.

    The model is built before it is moved to the device, so that its initial weights do not depend on the device.

    Args:
        model: the name of a ready-made model, or FILE.py:FUNCTION.
        schema: the features.
        settings: width and hidden layers of a ready-made model.
        device: the device of the model; None to leave the model where it was built.
    """
    build: Callable[[], nn.Module]
    if is_model_file(model):
        module, function = load_function(model)
        build, loss = partial(build_from_function, model, function, schema), getattr(module, "loss", LOG_LOSS)
    else:
        width, hidden = settings.get("width"), settings.get("hidden")
        build, loss = partial(models.build, model, schema, width=width, hidden=hidden), LOG_LOSS
    return build if device is None else lambda: build().to(device), loss


def read_model_file(folder: Path) -> tuple[str, dict[str, Any]] | None:
    """Read the model of a checkpoint folder and its settings; None if the folder does not describe one.

    The folder may be untrusted, so a model file that it names must not be imported; see
    `read_ready_made_model`.

    Raises:
        UsageError: if the file is damaged.
    """
    path = folder / MODEL_FILE
    if not path.is_file():
        return None
    try:
        settings = json.loads(path.read_text("utf-8"))
        sizes = [settings.get("width") or 1, *(settings.get("hidden") or [])]
        if not all(type(size) is int and size > 0 for size in sizes):
            raise ValueError(f"sizes must be positive integers, got {sizes}")
        return str(settings.pop("model")), settings
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{path} is damaged: it should describe the model, as in "
            f'{{"model": "{DEFAULT_MODEL}"}}. Give `cadam run` the --model, --width and --hidden of the first run '
            f"(--model {DEFAULT_MODEL} if it had none), which writes the file again"
        ) from error


def read_ready_made_model(folder: Path) -> tuple[str, dict[str, Any]] | None:
    """Read the model of a checkpoint folder as `read_model_file` does, if no code has to be imported to build it.

    Raises:
        UsageError: if the file is damaged, or if the model is FILE.py:FUNCTION.
    """
    saved = read_model_file(folder)
    if saved is not None and is_model_file(saved[0]):
        raise UsageError(
            f"the model of {folder} is {saved[0]}, and a Python file is imported only if you name it yourself. If you "
            f"trust this file, give --model {shell_word(saved[0])} (in Python: model=...)"
        )
    return saved


def _describe(model: str, settings: Mapping[str, Any]) -> str:
    """Describe a model with its settings for a message."""
    if is_model_file(model):
        return model
    hidden = f" and hidden layers {','.join(map(str, settings['hidden']))}" if settings.get("hidden") else ""
    return f"{model} with width {settings.get('width') or DEFAULT_WIDTH}{hidden}"


def absolute_location(model: str) -> str:
    """Make the path of FILE.py:FUNCTION absolute; names of ready-made models do not change."""
    file, _, function = model.rpartition(":")
    return f"{Path(file).resolve()}:{function}" if file else model


def choose_model(options: argparse.Namespace, folder: Path | None) -> tuple[str, dict[str, Any]]:
    """Take the model and its settings from the options, from the checkpoint folder, or from the defaults.

    Sizes that are not given are those of the folder, also if the options name its model: `cadam migrate` writes hidden
    layers into the folder that the command before had not named.
    """
    settings: dict[str, Any] = {}
    if options.width is not None:
        settings["width"] = options.width
    if options.hidden is not None:
        try:
            settings["hidden"] = [int(size) for size in options.hidden.split(",")]
        except ValueError:
            raise UsageError(f"--hidden should be sizes of layers, as in 64,32; got {options.hidden!r}") from None
    if any(size < 1 for size in (settings.get("width", 1), *settings.get("hidden", ()))):
        raise UsageError("--width and --hidden must be at least 1")
    saved = None if folder is None else _read_model_named(folder, options.model)
    model, saved_settings = saved or (options.model or DEFAULT_MODEL, {})
    _check_settings(model, settings)
    return model, {**saved_settings, **settings}


def _read_model_named(folder: Path, name: str | None) -> tuple[str, dict[str, Any]] | None:
    """Read the ready-made model of a checkpoint folder; None if it has no such model.

    Args:
        folder: the checkpoint folder.
        name: the name of the model, None for any.
    """
    if name is None:
        return read_ready_made_model(folder)
    try:
        saved = read_model_file(folder)
    except UsageError:  # the file is written again from the options
        return None
    return saved if saved is not None and saved[0] == name else None


def _check_settings(model: str, settings: Mapping[str, Any]) -> None:
    """Check that a model has the parts whose sizes are given."""
    if is_model_file(model) and settings:
        raise UsageError(f"--width and --hidden are for ready-made models; {model} is your own")
    for option, part, attribute in (
        ("width", "embeddings", "has_embeddings"),
        ("hidden", "hidden layers", "has_hidden"),
    ):
        if option in settings and model in models.MODELS and not getattr(models.MODELS[model], attribute):
            supported = ", ".join(name for name, kind in models.MODELS.items() if getattr(kind, attribute))
            raise UsageError(
                f"--{option} is for models with {part} ({supported}), and {model} has none: leave it out, or give "
                "another --model"
            )
