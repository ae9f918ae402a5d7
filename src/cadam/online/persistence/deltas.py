"""Deltas: the difference between the weights of a model at two moments, with which a serving copy follows the learner.

A delta has the rows that changed, and whole tensors where most rows did. It names the version that it starts from and
the version that it leads to. A version is a hash of all weights, so a delta that is damaged, is missing or comes in the
wrong order is noticed before anything is changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ...atomic_write import wait_for_folder, write_with
from ...checkpoint_files import DamagedCheckpointError, expect_valid_content, hash_content, read_tree, write_tree
from .checkpoints import CHECKPOINT_NAME

if TYPE_CHECKING:
    from .export import LoadedModel

FORMAT = "cadam delta 1"
MOST = 0.5
"""If more than this share of the rows of a tensor changed, the delta has the whole tensor."""
FEW_ROWS = 16
"""Tensors with fewer rows than this are compared element by element."""

Weights = Mapping[str, Tensor]
"""The state dict of a model."""


class DeltaError(ValueError):
    """A delta cannot be applied. Nothing was changed."""


def version_of(weights: Weights) -> str:
    """Return the version of weights: a hash of their names, types, shapes and values."""
    return hash_content("", {name: value.detach().cpu().contiguous() for name, value in weights.items()})


def compute_delta(base: Weights, new: Weights) -> dict[str, Any]:
    """Return the difference of two state dicts as a tree that `write_tree` can store.

    Raises:
        ValueError: If the state dicts belong to different models.
    """
    if base.keys() != new.keys():
        names = sorted(base.keys() ^ new.keys())
        raise ValueError(f"the weights belong to different models: only one of them has {', '.join(names[:3])}")
    whole: dict[str, Tensor] = {}
    rows: dict[str, dict[str, Tensor]] = {}
    for name, value in new.items():
        before, after = base[name].detach().cpu().contiguous(), value.detach().cpu().contiguous()
        if before.dtype != after.dtype or before.shape[1:] != after.shape[1:] or before.dim() != after.dim():
            raise ValueError(f"the weights belong to different models: {name} has another shape or type")
        if not after.dim():
            if not np.array_equal(_units(before), _units(after)):
                whole[name] = after
            continue
        changed = _changed_rows(before, after)
        units = _units(after)
        if len(changed) > MOST * max(1, len(units)) or (before.shape != after.shape and not len(changed)):
            whole[name] = after
        elif len(changed):
            index = changed.astype(np.int32) if len(units) < 2**31 else changed
            values = torch.from_numpy(units[changed]).view(after.dtype)
            rows[name] = {"rows": torch.from_numpy(index), "values": values}
    return {
        "format": FORMAT,
        "base": version_of(base),
        "version": version_of(new),
        "lengths": {name: len(new[name]) for name in rows},
        "whole": whole,
        "rows": rows,
    }


def _units(x: Tensor) -> np.ndarray[Any, Any]:
    """Return the parts of a tensor that a delta replaces, as an array of bytes: its rows, or its elements."""
    elements = x.shape[1:].numel() if x.dim() > 1 and len(x) >= FEW_ROWS else 1
    size = elements * x.itemsize
    return x.reshape(-1).view(torch.uint8).numpy().reshape(-1, size) if x.numel() else np.zeros((0, size), np.uint8)


def _changed_rows(before: Tensor, after: Tensor) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the numbers of the units that differ in any bit, and of those that are new."""
    if len(before) != len(after) and min(len(before), len(after)) < FEW_ROWS and after.dim() > 1:
        return np.arange(len(_units(after)))
    a, b = _units(before), _units(after)
    count = min(len(a), len(b))
    sizes = (np.uint64, np.uint32, np.uint16, np.uint8)
    wide = next(kind for kind in sizes if a.shape[1] % np.dtype(kind).itemsize == 0)
    differs = (a[:count].view(wide) != b[:count].view(wide)).any(1)
    return np.concatenate([np.flatnonzero(differs), np.arange(count, len(b))])


def apply_to_weights(weights: Weights, delta: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors that a delta changes, with their new values. The given weights stay as they are.

    Raises:
        DeltaError: If the delta does not fit the weights.
    """
    changed: dict[str, Tensor] = dict(delta["whole"])
    for name, part in delta["rows"].items():
        if name not in weights:
            raise DeltaError(f"the model has no {name}: the delta belongs to another model")
        old, length = weights[name].detach().cpu(), delta["lengths"][name]
        new = torch.zeros((length, *old.shape[1:]), dtype=old.dtype)
        count = min(length, len(old))
        new[:count] = old[:count]
        units, index = _units(new), part["rows"].numpy()
        values = part["values"].contiguous().view(torch.uint8).numpy()
        if part["values"].dtype != old.dtype or values.size != len(index) * units.shape[1]:
            raise DeltaError(f"{name} has another type or width than the delta: the delta belongs to another model")
        if len(index) and not 0 <= index.min() <= index.max() < len(units):
            raise DeltaError(f"the delta has rows of {name} that do not exist")
        units[index] = values.reshape(len(index), -1)
        changed[name] = new
    for name, value in changed.items():
        if name not in weights or value.shape[1:] != weights[name].shape[1:] or value.dtype != weights[name].dtype:
            raise DeltaError(f"{name} does not fit the model: the delta belongs to another model")
    return changed


def read_weights(since: str | Path, folder: Path) -> dict[str, Tensor]:
    """Read the weights that a delta starts from.

    Args:
        since: The number of a checkpoint that is still in the folder, the file of a checkpoint, or the MODEL.pt of an
            export.
        folder: The folder of the checkpoints.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file does not contain weights.
    """
    path = Path(since)
    if str(since).isdigit() and not path.exists():
        path = folder / f"checkpoint-{int(str(since)):012d}.safetensors"
        if not path.is_file():
            raise FileNotFoundError(
                f"{folder} does not have checkpoint {int(str(since))} any more: give the MODEL.pt of the last export, "
                "or a copy of that checkpoint"
            )
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist: give the number or the file of a checkpoint, or the MODEL.pt of an export"
        )
    if CHECKPOINT_NAME.fullmatch(path.name) or path.suffix == ".safetensors":
        with expect_valid_content(path):
            return dict(read_tree(path)["model"])
    return read_exported(path)


def read_exported(path: Path) -> dict[str, Tensor]:
    """Read the weights of an export, MODEL.pt.

    Raises:
        ValueError: If the file does not contain weights.
    """
    try:
        weights = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # a file that is not an archive can make the unpickler raise anything
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{path} cannot be read as weights: {reason}") from error
    if not isinstance(weights, Mapping) or not all(isinstance(value, Tensor) for value in weights.values()):
        raise ValueError(f"{path} does not contain the weights of a model")
    return dict(weights)


def write_delta(loaded: LoadedModel, since: str | Path, path: Path) -> dict[str, int]:
    """Write a delta from earlier weights to those of a loaded model.

    Args:
        loaded: The model.
        since: The weights that the serving copy has, see `read_weights`.
        path: The file to write.

    Returns:
        The number of changed rows of each tensor; -1 for a tensor that the delta has as a whole.

    Raises:
        ValueError: If the weights belong to different models.
        OSError: If a file cannot be read or written. A file that existed before is then unchanged.
    """
    new = {name: value.cpu() for name, value in loaded.model.state_dict().items()}
    delta = compute_delta(read_weights(since, loaded.path.parent), new)
    path.parent.mkdir(parents=True, exist_ok=True)
    with wait_for_folder(path.parent):  # another export may write the same delta
        write_tree(path, {**delta, "events": loaded.events})
    return {**dict.fromkeys(delta["whole"], -1), **{name: len(part["rows"]) for name, part in delta["rows"].items()}}


def read_delta(path: Path | str) -> dict[str, Any]:
    """Read a delta.

    Raises:
        DeltaError: If the file is missing, incomplete, damaged or not a delta.
    """
    try:
        delta = read_tree(Path(path))
    except DamagedCheckpointError as error:
        raise DeltaError(f"the delta cannot be read, and nothing was changed: {error}") from error
    if not isinstance(delta, dict) or delta.get("format") != FORMAT:
        raise DeltaError(f"{path} is not a delta; nothing was changed")
    return delta


def is_applied(delta: Mapping[str, Any], version: str, path: Path | str) -> bool:
    """Return whether a version is already the one to which a delta leads, so that a repeated command does no harm.

    Raises:
        DeltaError: If the delta neither leads to this version nor starts from it.
    """
    if version == delta["version"]:
        return True
    if version != delta["base"]:
        raise DeltaError(
            f"{path} starts from version {delta['base'][:12]}, but this copy has version {version[:12]}: a delta is "
            "missing, or comes in the wrong order. Nothing was changed; apply the missing one first, or copy a full "
            "export"
        )
    return False


def apply_delta_to_file(delta_path: Path | str, weights_path: Path | str) -> int:
    """Apply a delta to the MODEL.pt of an export, which is replaced.

    Returns:
        The number of events that the learner had seen.

    Raises:
        DeltaError: If the delta does not fit; the file is then unchanged.
        OSError: If the file cannot be written; it is then unchanged.
    """
    delta, weights_path = read_delta(delta_path), Path(weights_path)
    weights = read_exported(weights_path)
    if is_applied(delta, version_of(weights), delta_path):
        return int(delta["events"])
    new = {**weights, **apply_to_weights(weights, delta)}
    if version_of(new) != delta["version"]:
        raise DeltaError(f"{delta_path} does not lead to the version that it names; nothing was changed")
    try:
        write_with(weights_path, lambda file: torch.save(new, file))
    except RuntimeError as error:  # torch raises it when the disk is full
        raise OSError(f"{weights_path} cannot be written, and was not changed: {error}") from error
    return int(delta["events"])
