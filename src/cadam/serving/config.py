"""The configuration of a service, which the supervisor passes to the other processes."""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import stat
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, cast

from ..atomic_write import write_with
from ..online import models
from ..online.data.schema import Schema
from ..online.labels.join import LabelOptions, Unmatched, check_label_options
from ..online.models.model_file import UsageError, is_log_loss, is_model_file, load_function
from ..online.persistence.checkpoints import list_checkpoints, read_newest
from ..online.run_config import (
    MODEL_HELP,
    SCHEMA_FILE,
    RunConfig,
    absolute_location,
    check_same_schema,
    choose_model,
    model_builder,
)
from .arms import Arm
from .event_log import LOG_FILE, URI_FILE, open_uri

ID_COLUMN, TIME_COLUMN = "event_id", "received_at"
"""The columns that a service adds to events whose schema has no id or no time."""
SHARED_MEMORY = Path("/dev/shm")
SERVICE_LOCK_FILE = ".serve.lock"
"""The file in the folder of a service that the service locks while it runs."""
MIN_TOKEN_LENGTH = 16
TOKEN_VARIABLE = "CADAM_SERVE_TOKEN"
"""The environment variable with which the supervisor passes the token to the front processes."""


@dataclass(frozen=True)
class Limits:
    """Limits of a request, and of the number of requests that wait.

    Args:
        body: the largest body of a request in bytes.
        events: the largest number of events or labels of a request.
        waiting: the largest number of events and labels that wait for an answer. Further requests get status 503.
        seconds: the longest time that a request may wait before it gets status 503, and that a client may take to
            send its request.
        connections: the largest number of open connections of a front process.
    """

    body: int = 1 << 20
    events: int = 1_000
    waiting: int = 2_000
    seconds: float = 5.0
    connections: int = 10_000


@dataclass(frozen=True)
class ServiceConfig:
    """Everything that the processes of a service have to know."""

    folder: str
    """The folder with the log, the checkpoints, schema.json and model.json."""
    model: str
    """The name of a ready-made model, or FILE.py:FUNCTION."""
    settings: dict[str, Any]
    """The width and the hidden layers of a ready-made model, if they were given."""
    start_from: str | None = None
    """The folder of a run whose model the service starts with."""
    optimizer: str = "CAdam"
    lr: float = 3e-3
    challengers: tuple[str, ...] = ()
    """Optimizers that learn in shadow, with options and a learning rate."""
    promotes_automatically: bool = False
    """Whether a challenger that is better becomes the champion without a request."""
    seed: int = 0
    device: str | None = None
    threads: int = 1
    horizon: float = math.inf
    unmatched: str | None = None
    capacity: int = 1_000_000
    batch_size: int = 512
    """The largest number of log entries that are learned together."""
    refresh_seconds: float = 0.5
    """The shortest time between two snapshots of the model."""
    refresh_steps: int | None = None
    """The number of training steps between two snapshots; if it is given, it decides instead of the time."""
    checkpoint_seconds: float = 60.0
    keep: int = 3
    guard_seconds: float | None = 3600.0
    """The shortest time of an alert of the guard, None for no guard."""
    retain_seconds: float | None = None
    retain_bytes: int | None = None
    token_file: str | None = None
    has_local_address: bool = True
    """Whether only this machine can connect."""
    title: str = "cadam serve"
    schema_digest: str = ""
    """The digest of schema.json when the service was started; empty if changes are not noticed."""
    limits: Limits = field(default_factory=Limits)

    def to_json(self) -> str:
        """Return the configuration as a text that `from_json` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ServiceConfig:
        """Read what `to_json` returned."""
        values = json.loads(text)
        return cls(**{**values, "limits": Limits(**values["limits"]), "challengers": tuple(values["challengers"])})

    @property
    def path(self) -> Path:
        """The folder of the service."""
        return Path(self.folder)

    def schema(self) -> Schema:
        """Read the schema of the events, with an id and a time.

        Raises:
            UsageError: if the file has changed since the service was started. A process that is started again would
                convert events differently than the others.
        """
        path = self.path / SCHEMA_FILE
        if self.schema_digest and self.schema_digest != _digest(path):
            raise UsageError(f"{path} has changed while the service ran: restore it")
        return with_id_and_time(Schema.read(path))

    def label_options(self) -> LabelOptions:
        """Return how long events wait for their labels."""
        return LabelOptions(self.horizon, cast(Unmatched | None, self.unmatched), capacity=self.capacity)

    def arms(self) -> list[Arm]:
        """Return the champion at the first start and the challengers.

        Raises:
            UsageError: if one of them is invalid, or if two are equal.
        """
        arms = [Arm.parse(text, self.lr) for text in (self.optimizer, *self.challengers)]
        for number, arm in enumerate(arms):
            if str(arm) in map(str, arms[:number]):
                names = "the champion" if str(arm) == str(arms[0]) else "another challenger"
                raise UsageError(
                    f"the challenger {arm} is {names} too: leave it out, or give it another learning rate, as in "
                    f"--challenger {self.challengers[number - 1].partition(':')[0]}:lr={arm.lr / 3:.1g}"
                )
        return arms

    def runtime_folder(self) -> Path:
        """Create and return the folder for files that are exchanged between the processes and need not survive.

        It is in shared memory where there is enough of it, so that snapshots are never written to a disk.

        Raises:
            PermissionError: if another user owns the folder.
        """
        digest = hashlib.sha256(os.fsencode(self.path.resolve())).hexdigest()[:16]
        folder = SHARED_MEMORY / f"cadam-{os.getuid()}-{digest}"
        if not os.access(SHARED_MEMORY, os.W_OK):
            folder = self.path / "runtime"
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
        if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode) or status.st_mode & 0o077:
            raise PermissionError(f"{folder} must be a folder that only the user of the service can access")
        return folder

    def token(self) -> str | None:
        """Read the token that requests must carry, None if none is needed.

        Raises:
            UsageError: if the file has no usable token.
        """
        if self.token_file is None:
            return None
        text = Path(self.token_file).read_text(encoding="utf-8").strip()
        if len(text) < MIN_TOKEN_LENGTH or not text.isascii() or not text.isprintable() or " " in text:
            raise UsageError(
                f"--token-file {self.token_file} must contain one token of at least {MIN_TOKEN_LENGTH} ASCII "
                "characters without spaces: openssl rand -hex 32 > FILE"
            )
        return text


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def with_id_and_time(schema: Schema) -> Schema:
    """Add an id and a time to a schema that has none, because labels that arrive later need them."""
    names = schema.column_names()
    return replace(
        schema,
        id=schema.id or f"{_unused(ID_COLUMN, names)}:text",
        time=schema.time or _unused(TIME_COLUMN, names),
    )


def without_label(schema: Schema) -> Schema:
    """Return the schema by which events are converted: a value in the column of the label is ignored.

    In the log, labels are separate entries.
    """
    return replace(schema, label=_unused("label", schema.column_names()), binary=False)


def _unused(name: str, names: list[str]) -> str:
    while name in names:
        name = f"_{name}"
    return name


def locate(folder: Path | None) -> tuple[Path, Path | None]:
    """Find the folder of the service, and the folder of the run that it starts from.

    Args:
        folder: the folder of a service or of a run; None for a service that starts from nothing.

    Returns:
        The folder of the service, which need not exist, and the folder of the run, if there is one.
    """
    if folder is None:
        return Path("runs", "serve"), None
    service, run = folder / "serve", folder if list_checkpoints(folder) else None
    if is_service(folder) or (run is None and not is_service(service)):
        return folder, None
    return service, run


def is_service(folder: Path) -> bool:
    """Whether a folder is that of a service, not that of a run."""
    return any((folder / name).is_file() for name in (LOG_FILE, URI_FILE))


def read_config(options: argparse.Namespace) -> ServiceConfig:
    """Create the configuration from the options of `cadam serve`, and write schema.json and model.json.

    Raises:
        UsageError: if the options are invalid, incomplete, or contradict the files in the folder.
    """
    folder, run = locate(options.folder)
    described = folder if (folder / SCHEMA_FILE).is_file() else run
    model, settings = choose_model(options, described)
    if not is_model_file(model) and model not in models.MODELS:
        raise UsageError(f"no model is called {model!r}; there are {MODEL_HELP}")
    schema = _choose_schema(options, model, described)
    check_same_schema(schema, folder, in_order=not is_model_file(model), complete=with_id_and_time)
    if run is not None and not list_checkpoints(folder):  # later, the service may have been migrated
        check_same_schema(schema, run, in_order=not is_model_file(model), model_only=True)
    build, loss = model_builder(model, schema, settings)
    run_config = RunConfig("", schema, model, build, loss, settings)
    if described is not None and (difference := run_config.describe_difference(described)):
        raise UsageError(f"the model of {described} cannot change: {difference}")
    has_own_model = is_model_file(model)
    name, lr = _saved_optimizer(folder if list_checkpoints(folder) else run) or (
        "CAdam",
        1e-3 if has_own_model else 3e-3,
    )
    if options.promote == "auto" and not options.challenger:
        raise UsageError("--promote auto needs a --challenger, as in --challenger adam")
    if not options.horizon > 0:
        raise UsageError(f"--horizon must be a positive number of seconds or inf, got {options.horizon:g}")
    if options.unmatched == "negative" and options.horizon == math.inf:
        raise UsageError("--unmatched negative needs --horizon, after which an event counts as negative")
    given = {part.name: getattr(options, part.name) for part in fields(Limits) if hasattr(options, part.name)}
    config = ServiceConfig(
        folder=str(folder.resolve()),
        model=absolute_location(model),
        settings=settings,
        start_from=None if run is None else str(run.resolve()),
        optimizer=options.optimizer or name,
        lr=lr if options.lr is None else options.lr,
        challengers=tuple(_with_saved_rate(text, folder) for text in options.challenger),
        promotes_automatically=options.promote == "auto",
        seed=options.seed,
        device=options.device,
        threads=options.threads,
        horizon=options.horizon,
        unmatched=options.unmatched,
        capacity=options.capacity,
        refresh_seconds=options.refresh.seconds,
        refresh_steps=options.refresh.steps,
        guard_seconds=options.guard,
        retain_seconds=options.retain,
        retain_bytes=options.retain_size,
        token_file=None if options.token_file is None else str(options.token_file.resolve()),
        title=f"cadam serve: {folder}",
        limits=Limits(**given),
    )
    config.token()
    _check_state(config, folder, is_log_loss=is_log_loss(loss))
    folder.mkdir(parents=True, exist_ok=True)
    run_config.write(folder)
    _write_log_uri(options.log, folder)
    return replace(config, schema_digest=_digest(folder / SCHEMA_FILE))


def _write_log_uri(uri: str | None, folder: Path) -> None:
    """Store where the log of a service is, unless it is a SQLite log in its folder.

    Raises:
        UsageError: if the service has a SQLite log.
        ValueError: if the URI does not name a log.
        LogUnavailableError: if the log cannot be opened.
    """
    if uri is None:
        return
    if (folder / LOG_FILE).is_file():
        raise UsageError(f"the log of {folder} is its file {LOG_FILE} and cannot change: leave out --log")
    open_uri(uri).close()

    def write(path: Path) -> None:
        path.chmod(0o600)  # the URI may have a password
        path.write_text(f"{uri}\n", encoding="utf-8")

    write_with(folder / URI_FILE, write)


def _choose_schema(options: argparse.Namespace, model: str, folder: Path | None) -> Schema:
    """Take the schema from --schema, from the model's file, or from the folder of the service or run."""
    if options.schema is not None:
        return Schema.read(options.schema)
    if is_model_file(model) and isinstance(schema := getattr(load_function(model)[0], "SCHEMA", None), Schema):
        return schema
    if folder is not None and (folder / SCHEMA_FILE).is_file():
        return Schema.read(folder / SCHEMA_FILE)
    raise UsageError(
        "give --schema schema.json, which describes an event, or the folder of a cadam run. From data, "
        "`cadam schema clicks.csv --label click` writes a schema"
    )


def _check_state(config: ServiceConfig, folder: Path, *, is_log_loss: bool) -> None:
    """Raise UsageError if optimizers or label options contradict each other, the loss, or the state in the folder."""
    arms = config.arms()
    if len(arms) > 1 and not is_log_loss:
        raise UsageError("--challenger needs a model with the log loss, by which champion and challengers are compared")
    if not list_checkpoints(folder):
        return
    _, state = read_newest(folder)
    try:
        check_label_options(state["pending"], config.label_options())
    except ValueError as error:
        raise UsageError(f"{folder}: {error}. Give the old options, or another FOLDER") from error
    saved = str(state["optimizer_name"])
    saved_arms = state.get("arms") or {}
    champion, given = saved_arms.get("champion", saved), set(map(str, arms))
    is_promoted = champion != saved_arms.get("first", champion)
    # The options of a champion from the beginning may change, but not which of several arms is the champion.
    if champion not in given and (is_promoted or arms[0].spec.kind.__name__ != saved):
        missing = [name for name in (champion, *saved_arms.get("challengers", {})) if name not in given]
        advice = f"give {' '.join(f'--challenger {name}' for name in missing)}"
        if str(arms[0]) not in saved_arms.get("challengers", {}):
            change = f"--optimizer {arms[0].spec} --lr {arms[0].lr:g}"
            advice += f", or switch its optimizer with `cadam migrate {folder} {change}`"
        raise UsageError(f"the champion of {folder} is {champion}: {advice}")


def _with_saved_rate(text: str, folder: Path) -> str:
    """Give a challenger without a learning rate that of the challenger in the newest checkpoint that it names.

    Without a checkpoint, its rate is that of the champion. The champion's rate may change later, by a migration.
    """
    has_rate = any(part.partition("=")[0].strip() == "lr" for part in text.split(":"))
    if has_rate or not list_checkpoints(folder):
        return text
    _, state = read_newest(folder)
    if not (arms := state.get("arms")):
        return text
    names = {*arms["challengers"], arms["champion"]} - {arms["first"]}
    spec = Arm.parse(text, 1.0).spec
    saved = [name for name in names if str(Arm.parse(name, 1.0).spec) == str(spec)]
    return saved[0] if len(saved) == 1 else text


def _saved_optimizer(folder: Path | None) -> tuple[str, float] | None:
    """Return the name and the learning rate of the optimizer in the newest checkpoint of a folder."""
    if folder is None or not list_checkpoints(folder):
        return None
    _, state = read_newest(folder)
    if state.get("arms"):  # a service; its champion may be a promoted challenger
        first = Arm.parse(state["arms"]["first"], 0.0)
        return str(first.spec), first.lr
    return str(state["optimizer_name"]), float(state["optimizer"]["param_groups"][0]["lr"])
