"""Migration of a learner's state to another schema or optimizer, which keeps everything that still has a meaning.

The state of a ready-made model is copied entry by entry. Rows of the tables are matched by feature and bucket; the
slopes and normalization samples of numbers by feature and position; the inputs of deeper layers by field. Moments are
copied with their weights. A new column does not change the scores: in models with pairwise interactions its embeddings
start at zero, and in other models the weights of the layers that read them do. A hashed column that becomes k times as
large keeps what it has learned, because the new bucket of a value modulo the old size is its old bucket. With any
other size, its rows are initialized again. Events that wait are stored with their old buckets, from which the new ones
follow only if the old size is a multiple of the new one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..data.events import FEATURE_PREFIX, Array, Columns
from ..data.kind import MISSING_ID, Kind
from ..data.limit import REST
from ..data.schema import Schema
from ..models import networks
from ..models.id_features import IdFeatures
from ..models.inputs import BINS
from ..models.model_file import OptimizerSpec, UsageError

FRESH = -1
"""In a map from new to old indices: an entry that does not exist in the old state."""
RESIZABLE = ("hash", "words", "category")


def change_schema(schema: Schema, add: Mapping[str, str], drop: Sequence[str], resize: Mapping[str, str]) -> Schema:
    """Return a copy of a schema in which features are added, dropped or resized.

    Args:
        schema: the schema.
        add: new features with their kinds.
        drop: features to leave out.
        resize: features with their new kinds, which may differ from the old ones only in size.

    Raises:
        UsageError: if a change is not possible.
    """
    features = dict(schema.features)
    for name in (*drop, *resize):
        if name not in features:
            raise UsageError(f"there is no feature {name!r}; the features are {', '.join(schema.features)}")
    for name in drop:
        del features[name]
    for name, text in resize.items():
        _check_resize(name, schema.kinds[name], _parse_kind(name, text))
        features[name] = text
    for name, text in add.items():
        if name in features:
            raise UsageError(f"{name!r} is already a feature, of the kind {features[name]}; --resize changes its size")
        kind = _parse_kind(name, text)
        if not kind.optional:
            raise UsageError(f"{name}: events so far do not have this column, so its kind must be optional: {text}?")
        features[name] = text
    try:
        return replace(schema, features=features)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _parse_kind(name: str, text: str) -> Kind:
    try:
        return Kind.parse(text)
    except ValueError as error:
        raise UsageError(f"{name}: {error}") from None


def _check_resize(name: str, old: Kind, new: Kind) -> None:
    if old.name not in RESIZABLE or replace(old, size=new.size) != new:
        raise UsageError(
            f"{name} is {old}, and only the size of hash, words and category can change, not to {new}: give --drop "
            f"{name}, and --add a column of another name"
        )
    if old.name == "category" and new.size < old.size:
        raise UsageError(f"{name} is {old}: categories can be added but not removed, because events may have them")


@dataclass
class Migration:
    """A migration from one schema to another, and maybe to another optimizer.

    Args:
        model: the name of a ready-made model.
        settings: its width and hidden layers, if they were given.
        old: the schema of the state.
        new: the new schema.
        optimizer: the new optimizer, None to keep the present one.
        lr: the new learning rate, None to keep the present one.
    """

    model: str
    settings: Mapping[str, Any]
    old: Schema
    new: Schema
    optimizer: OptimizerSpec | None = None
    lr: float | None = None

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self._old_model = self._build(self.old, self.settings)
        deep = getattr(self._old_model, "deep", ())
        hidden = [layer.out_features for layer in deep if isinstance(layer, torch.nn.Linear)][:-1]
        self.new_settings = {**self.settings, **({"hidden": hidden} if hidden else {})}
        """The settings of the new model, with hidden layers, because their default depends on the number of columns."""
        self._new_model = self._build(self.new, self.new_settings)
        self._maps = {"rows": self._map_rows(), "numbers": self._map_numbers(), "inputs": self._map_inputs()}

    def _build(self, schema: Schema, settings: Mapping[str, Any]) -> networks.Linear:
        return networks.build(self.model, schema, width=settings.get("width"), hidden=settings.get("hidden"))

    # Maps from new to old indices ---------------------------------------------------------------------------------

    def _map_rows(self) -> Array:
        parts = []
        old_ranges = self._old_model.inputs.row_ranges
        for name, (_, size) in self._new_model.inputs.row_ranges.items():
            if name not in old_ranges:
                parts.append(np.full(size, FRESH))
                continue
            start, _ = old_ranges[name]
            rows = map_buckets(self.old.kinds[name], self.new.kinds[name])
            parts.append(np.where(rows == FRESH, FRESH, rows + start))
        old_bins = sum(size for _, size in old_ranges.values())
        numbers = self._map_numbers()
        bins = np.arange(BINS + 1)
        parts += [np.where(n == FRESH, FRESH, old_bins + n * (BINS + 1) + bins) for n in numbers.tolist()]
        return np.concatenate([np.empty(0, np.int64), *parts]).astype(np.int64)

    def _map_numbers(self) -> Array:
        return _map_names(_number_parts(self.old), _number_parts(self.new))

    def _map_inputs(self) -> Array:
        fields = _map_names(_fields(self.old, self._old_model), _fields(self.new, self._new_model))
        entries = np.arange(self._new_model.inputs.width)
        parts = [np.where(number == FRESH, FRESH, number * len(entries) + entries) for number in fields.tolist()]
        return np.concatenate([np.empty(0, np.int64), *parts]).astype(np.int64)

    def _dimensions(self, name: str, dimensions: int) -> list[Array | None]:
        """Return the map of each dimension of a parameter or buffer; None if the dimension does not change."""
        maps: list[str | None] = [None] * dimensions
        if name in ("inputs.table.weight", "inputs.linear.weight"):
            maps[0] = "rows"
        elif name in ("inputs.vectors", "inputs.slopes") or name.startswith("inputs.normalizer."):
            maps[0] = "numbers"
        elif name in ("deep.0.weight", "out.weight") or name.endswith("weight.0.weight"):
            maps[1] = "inputs"
        elif name.startswith("crosses."):
            maps = ["inputs"] * dimensions
            if name.endswith("weight.1.weight"):
                maps[1] = None
        return [None if key is None else self._maps[key] for key in maps]

    def _copy(self, name: str, old: Tensor, new: Tensor) -> Tensor:
        """Return a copy of `new` in which every entry that also exists in `old` has its old value."""
        maps = self._dimensions(name, new.dim())
        targets, sources = [], []
        for size, each in zip(new.shape, maps, strict=True):
            known = np.arange(size) if each is None else np.flatnonzero(each != FRESH)
            targets.append(known)
            sources.append(known if each is None else each[known])
        result = new.clone()
        if new.dim() == 0:
            return old.clone()
        target, source = (
            torch.from_numpy(np.ravel_multi_index(np.ix_(*index), tuple(tensor.shape)).reshape(-1))
            for index, tensor in ((targets, new), (sources, old))
        )
        result.view(-1)[target] = old.contiguous().view(-1)[source].to(result.dtype)
        return result

    # The parts of a state -----------------------------------------------------------------------------------------

    def model_state(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the state dict of the new model.

        Raises:
            UsageError: if a weight would change its shape in a way for which old values cannot be copied.
        """
        fresh = self._new_model.state_dict()
        self._make_neutral(fresh)
        migrated: dict[str, Tensor] = {}
        for name, new in fresh.items():
            if name.startswith("inputs.ids."):
                migrated[name] = self._id_state(name, new, state)
            elif name in state:
                old = state[name]
                changed = [d for d, each in enumerate(self._dimensions(name, new.dim())) if each is None]
                if old.dim() != new.dim() or any(old.shape[d] != new.shape[d] for d in changed):
                    raise UsageError(f"{name} has the shape {tuple(old.shape)}, which the new schema cannot keep")
                migrated[name] = self._copy(name, old, new)
            elif name.startswith("crosses."):
                raise UsageError("the cross layers of dcn would change their form with this number of columns")
            else:
                migrated[name] = new
        return migrated

    def _make_neutral(self, fresh: dict[str, Tensor]) -> None:
        """Set weights of a new model such that new columns do not change its scores."""
        if self._new_model.has_pairs:
            names = ["inputs.table.weight", "inputs.vectors"]
        else:
            names = [name for name in fresh if name in ("deep.0.weight", "out.weight") or name.startswith("crosses.")]
        for name in names:
            if name in fresh:
                fresh[name].zero_()

    def _id_state(self, name: str, new: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        """Return the rows of ids of a feature, which are numbered by the order of the features."""
        number, _, rest = name.removeprefix("inputs.ids.").partition(".")
        feature = _id_features(self.new)[int(number)]
        old = _id_features(self.old)
        return state[f"inputs.ids.{old.index(feature)}.{rest}"] if feature in old else new

    def optimizer_state(self, state: Mapping[str, Any], name: str) -> dict[str, Any]:
        """Return the state dict of the new optimizer.

        Args:
            state: the state dict of the old one.
            name: the name of the old one.

        Raises:
            UsageError: if the state has a form that cannot be migrated.
        """
        spec = self.optimizer or OptimizerSpec.parse(name)
        if len(state["param_groups"]) > 1 or spec.group_options:
            raise UsageError("options of some parameters (OPTION@PATTERN) cannot be migrated: use those of all")
        group = state["param_groups"][0]
        optimizer = spec.build(self._new_model, self.lr or float(group["lr"]))
        migrated = optimizer.state_dict()
        names = {
            key: each
            for part in state["param_groups"]
            for key, each in zip(part["params"], part["param_names"], strict=True)
        }
        saved = {names[key]: values for key, values in state["state"].items()}
        shapes = dict(self._old_model.named_parameters())
        parameters = dict(self._new_model.named_parameters())
        for new_group in migrated["param_groups"]:
            kept = {
                key: value for key, value in group.items() if key in new_group and key not in ("params", "param_names")
            }
            options = {} if self.optimizer is None else self.optimizer.options
            new_group.update({**kept, **options}, **({} if self.lr is None else {"lr": self.lr}))
            for key, parameter in zip(new_group["params"], new_group["param_names"], strict=True):
                if parameter in saved:
                    migrated["state"][key] = {
                        entry: self._moment(parameter, entry, value, shapes[parameter], parameters[parameter])
                        for entry, value in saved[parameter].items()
                    }
        try:
            optimizer.load_state_dict(migrated)
        except (ValueError, RuntimeError, KeyError, TypeError) as error:
            raise UsageError(f"the moments of {name} do not fit {spec}: {error}") from error
        return migrated

    def _moment(self, name: str, entry: str, value: Any, old: Tensor, new: Tensor) -> Any:
        """Return the state of a parameter, such as its first moment."""
        maps = self._dimensions(name, new.dim())
        is_same = all(each is None or np.array_equal(each, np.arange(len(each))) for each in maps)
        if not isinstance(value, Tensor) or value.dim() == 0 or (is_same and old.shape == new.shape):
            return value
        if value.shape == old.shape:
            return self._copy(name, value, torch.zeros(new.shape, dtype=value.dtype))
        if value.shape == old.shape[:1]:  # one value per row of a table
            shape = (-1, *(1 for _ in old.shape[1:]))
            rows = torch.zeros(len(new), dtype=value.dtype).view(shape)
            return self._copy(name, value.view(shape), rows).view(-1)
        raise UsageError(
            f"the {entry} of {name} has the shape {tuple(value.shape)}, as quantized moments have: only the optimizer "
            "of such a state can be changed, not its columns"
        )

    def columns(self, columns: Columns) -> Columns:
        """Return the columns of encoded events, which wait for labels, for a training step or for their turn."""
        if not columns:
            return columns
        count = len(next(iter(columns.values())))
        migrated = {name: values for name, values in columns.items() if not name.startswith(FEATURE_PREFIX)}
        for name, kind in self.new.kinds.items():
            key = FEATURE_PREFIX + name
            if name not in self.old.kinds:
                missing = np.nan if kind.is_float else MISSING_ID if kind.name == "id" else 0
                shape = (count, kind.length) if kind.length else (count,)
                migrated[key] = np.full(shape, missing, kind.dtype)
            elif kind.size < self.old.kinds[name].size:
                first = int(kind.zero_is_missing)
                values = columns[key]
                migrated[key] = np.where(values < first, values, (values - first) % (kind.size - first) + first)
            else:
                migrated[key] = columns[key]
        return migrated

    @property
    def ambiguous_columns(self) -> list[str]:
        """The resized columns for which the old bucket of a value does not tell the new one."""
        return [
            name
            for name, kind in self.new.kinds.items()
            if name in self.old.kinds and not _is_bucket_known(self.old.kinds[name], kind)
        ]

    def state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state of a learner.

        Raises:
            UsageError: if the state cannot be migrated.
        """
        name, counts = str(state["optimizer_name"]), state["counts"]
        # New id features start at the present time and event count of the stream, by which their ids expire.
        if isinstance(ids := self._new_model.inputs.ids, IdFeatures):
            ids.advance(float(counts["clock/now"]), int(counts["events"]))
        migrated = {
            **state,
            "rate_tuning": None,
            "model": self.model_state(state["model"]),
            "optimizer": self.optimizer_state(state["optimizer"], name),
            "optimizer_name": name if self.optimizer is None else self.optimizer.kind.__name__,
            "pending": {**state["pending"], "rows": self.columns(state["pending"]["rows"])},
            "queue": self.columns(state["queue"]),
        }
        source = state["source"]
        if isinstance(source, Mapping) and REST in source:  # the run has stopped in the middle of a batch
            rest = {**source[REST], "events": self.columns(source[REST]["events"])}
            migrated["source"] = {**source, REST: rest}
        if self.old.features != self.new.features:
            migrated["drift"] = None  # its histograms are those of the old columns
        self._new_model.load_state_dict(migrated["model"])
        return migrated

    # A description ------------------------------------------------------------------------------------------------

    def describe(self, state: Mapping[str, Any], stale: int) -> list[str]:
        """Return lines that say what is kept.

        Args:
            state: the old state.
            stale: how many events that wait have old buckets of `ambiguous_columns`.
        """
        lines = []
        if state.get("rate_tuning") is not None:
            rate = state["optimizer"]["param_groups"][0]["lr"]
            lines.append(f"learning rate: {rate:.2g}, fixed; it was tuned until now, and --lr auto tunes it again")
        for name, kind in self.new.kinds.items():
            if name not in self.old.kinds:
                lines.append(f"{name}: new, {kind}; scores do not change until it is learned")
            elif (old := self.old.kinds[name]).size != kind.size:
                rows = map_buckets(old, kind)
                kept = int((rows != FRESH).sum())
                lines.append(
                    f"{name}: {old} becomes {kind}; {kept:,} of {len(rows):,} rows start with what was learned"
                )
            else:
                lines.append(f"{name}: {kind}, kept with its moments")
        lines += [f"{name}: dropped" for name in self.old.kinds if name not in self.new.kinds]
        saved = state["optimizer"]["param_groups"][0]
        if self.optimizer is not None:
            lines.append(f"optimizer: {state['optimizer_name']} becomes {self.optimizer}; its moments are kept")
        if self.lr is not None:
            lines.append(f"learning rate: {saved['lr']:g} becomes {self.lr:g}")
        old_size, new_size = (sum(p.numel() for p in m.parameters()) for m in (self._old_model, self._new_model))
        lines.append(f"{old_size:,} weights become {new_size:,}")
        lines.append(f"{len(state['pending']['number_of']['keys']):,} events that wait for their labels are kept")
        if stale:
            names = ", ".join(self.ambiguous_columns)
            lines.append(
                f"warning: {stale:,} events that wait to be learned are stored with their old rows of {names}, and may "
                "be learned in rows of other values. Migrate when no events wait, or --add a column of another "
                "name and --drop the old one later"
            )
        return lines


def count_waiting(state: Mapping[str, Any]) -> int:
    """Count the events of a learner's state that wait for labels, for a training step or for their turn."""
    source = state["source"]
    rest = source[REST]["events"] if isinstance(source, Mapping) and REST in source else {}
    others = (len(next(iter(columns.values()), ())) for columns in (state["queue"], rest))
    return len(state["pending"]["number_of"]["keys"]) + sum(others)


def _is_bucket_known(old: Kind, new: Kind) -> bool:
    """Whether the new bucket of a value follows from its old one."""
    first = int(new.zero_is_missing)
    return old.size == new.size or new.name == "category" or (old.size - first) % (new.size - first) == 0


def map_buckets(old: Kind, new: Kind) -> Array:
    """Map the rows of a feature to those before its size has changed; `FRESH` for rows that have to start again.

    The row of a hashed value is its hash modulo the number of buckets, after the row of missing values if there is one.
    """
    if old.size == new.size:
        return np.arange(new.size)
    rows = np.full(new.size, FRESH)
    first = int(new.zero_is_missing)
    rows[:first] = np.arange(first)
    if new.name == "category":
        rows[: old.size] = np.arange(old.size)
    elif (new.size - first) % (old.size - first) == 0:
        rows[first:] = np.arange(new.size - first) % (old.size - first) + first
    return rows


def _map_names(old: Sequence[Any], new: Sequence[Any]) -> Array:
    """Map the positions of names in a new order to those in the old one."""
    positions = {name: position for position, name in enumerate(old)}
    return np.array([positions.get(name, FRESH) for name in new], np.int64)


def _number_parts(schema: Schema) -> list[tuple[str, int]]:
    """List the numeric inputs of an event as (feature name, position in the feature)."""
    return [
        (name, position)
        for name, kind in schema.kinds.items()
        if kind.name == "number"
        for position in range(kind.length or 1)
    ]


def _fields(schema: Schema, model: networks.Linear) -> list[tuple[str, int]]:
    """List the fields of the model's input as (feature name, position), in the order of their embeddings."""
    inputs = model.inputs
    return [*((name, 0) for name in (*inputs.single_ids, *inputs.id_lists)), *_number_parts(schema)]


def _id_features(schema: Schema) -> list[str]:
    """List the features of the kind `id` in the order in which the model numbers them."""
    kinds = schema.kinds
    named = [name for name, kind in kinds.items() if kind.id_options is not None]
    return [name for name in named if not kinds[name].length] + [name for name in named if kinds[name].length]
