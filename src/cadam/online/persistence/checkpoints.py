"""Checkpoints: one safetensors file each, whole or not there.

A file is written beside its place, flushed to the disk and renamed. It carries a hash of all that is in it, so that one
which was damaged later is found out, and the one before it is used. Any tree of dicts, lists, numbers, text, tensors
and arrays can be kept: tensors and arrays as tensors of the file, the rest as JSON in its header.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from torch import Tensor

from ...atomic_write import write_with

FORMAT = "cadam online 2"
NEEDS = "checkpoints need safetensors: pip install safetensors"
FILES = "checkpoint-*.safetensors"
LEFT = re.compile(r"\..*\.new|\.tmp[A-Za-z0-9]{6}")
"""Names of files that a process which was killed while it wrote leaves behind: ours, and those of safetensors."""
logger = logging.getLogger("cadam.online")


class DamagedCheckpointError(ValueError):
    """A checkpoint that cannot be believed."""


# Trees ---------------------------------------------------------------------------------------------------------


def pack(tree: Any, tensors: dict[str, Tensor], name: str = "") -> Any:
    """The tree as JSON can hold it; tensors and arrays go into `tensors`. What cannot be kept is a TypeError."""
    if isinstance(tree, Tensor):
        # A copy: what is saved must not change while it is written, and shared storage has no place in the file.
        tensors[name] = tree.detach().to("cpu", copy=True).contiguous()
        return {"tensor": name}
    if isinstance(tree, np.ndarray):
        if tree.dtype == object:
            text = json.dumps(tree.tolist()).encode()
            tensors[name] = torch.from_numpy(np.frombuffer(text, dtype=np.uint8).copy())
            return {"objects": name}
        tensors[name] = torch.from_numpy(np.array(tree, order="C"))
        return {"array": name}
    if isinstance(tree, Mapping):
        pairs = [[_key(key, name), pack(value, tensors, f"{name}/{key}")] for key, value in tree.items()]
        return {"dict": pairs}
    if isinstance(tree, (list, tuple)):
        kind = "tuple" if isinstance(tree, tuple) else "list"
        return {kind: [pack(value, tensors, f"{name}/{i}") for i, value in enumerate(tree)]}
    if isinstance(tree, torch.dtype):
        return {"dtype": str(tree).removeprefix("torch.")}
    if isinstance(tree, np.generic):
        return tree.item()
    if tree is None or isinstance(tree, (bool, int, float, str)):
        return tree
    raise TypeError(f"{name or 'the state'} is a {type(tree).__name__}, which a checkpoint cannot keep")


def _key(key: Any, name: str) -> str | int:
    if isinstance(key, (str, int)):
        return key
    raise TypeError(f"{name or 'the state'} has the key {key!r}; a checkpoint keeps text and integers")


def unpack(packed: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The tree that `pack` was given."""
    if not isinstance(packed, dict):
        return packed
    ((kind, value),) = packed.items()
    if kind == "tensor":
        return tensors[value]
    if kind == "array":
        return tensors[value].numpy()
    if kind == "objects":
        objects = json.loads(tensors[value].numpy().tobytes())
        array = np.empty(len(objects), dtype=object)
        array[:] = objects
        return array
    if kind == "dict":
        return {key: unpack(entry, tensors) for key, entry in value}
    if kind == "dtype":
        return getattr(torch, value)
    entries = [unpack(entry, tensors) for entry in value]
    return tuple(entries) if kind == "tuple" else entries


# Files ---------------------------------------------------------------------------------------------------------


def write(path: Path, tree: Any) -> None:
    """Write a tree as one file, atomically. An OSError leaves whatever was there before."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    text = json.dumps(pack(tree, tensors))
    metadata = {"format": FORMAT, "tree": text, "sha256": _digest(text, tensors)}
    try:
        write_with(path, lambda new: save_file(tensors, new, metadata), f".{path.name}.new")
    except SafetensorError as error:
        raise OSError(f"{path}: {error}") from error


def read(path: Path) -> Any:
    """The tree in a file; `DamagedCheckpointError` if a bit of it is not as it was written."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ImportError(NEEDS) from error
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise DamagedCheckpointError(f"{path}: {error}") from error
    if metadata.get("format") != FORMAT:
        raise DamagedCheckpointError(f"{path}: its format is {metadata.get('format')!r}, not {FORMAT!r}")
    if _digest(metadata.get("tree", ""), tensors) != metadata.get("sha256"):
        raise DamagedCheckpointError(f"{path}: its content does not have the hash it was written with")
    return unpack(json.loads(metadata["tree"]), tensors)


def _digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        if tensor.numel():
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


# Folders -------------------------------------------------------------------------------------------------------


class Checkpoints:
    """The checkpoints of one learner under a folder, which it has alone while it lives; the last `keep` are kept."""

    def __init__(self, folder: Path | str, keep: int = 3) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}")
        if find_spec("safetensors") is None:
            raise ImportError(NEEDS)
        self.folder, self.keep = Path(folder), keep
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock: TextIO | None = lock(self.folder)
        for path in self.folder.iterdir():
            if LEFT.fullmatch(path.name):
                path.unlink()

    @staticmethod
    def has_any(folder: Path) -> bool:
        """Whether there are checkpoints, good or not."""
        return any(folder.glob(FILES))

    def files(self) -> list[Path]:
        """Oldest first."""
        return sorted(self.folder.glob(FILES))

    def save(self, number: int, tree: Any) -> Path:
        """Keep the tree as checkpoint `number`, and of the older ones the last."""
        path = self.folder / f"checkpoint-{number:012d}.safetensors"
        write(path, tree)
        for old in self.files()[: -self.keep]:
            old.unlink(missing_ok=True)
        return path

    def newest(self) -> tuple[Path, Any] | None:
        """The newest good checkpoint, None if there is none; damaged ones after it are renamed with a message.

        If there are checkpoints and none is good, that is an error, and they stay where they are, so that it is one at
        every attempt: to start anew must be somebody's decision.
        """
        files = self.files()
        damaged: list[Path] = []
        for path in reversed(files):
            try:
                tree = read(path)
            except DamagedCheckpointError as error:
                logger.error("damaged checkpoint, %s: %s", before(path, files), error)
                damaged.append(path)
                continue
            rename_damaged(damaged)
            return path, tree
        self.check_none(files)
        return None

    def check_none(self, files: Sequence[Path]) -> None:
        """That a search without a good checkpoint found no other either."""
        if files:
            raise DamagedCheckpointError(
                f"none of the {len(files)} checkpoints in {self.folder} is good: move them away to start anew"
            )

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()


def lock(folder: Path) -> TextIO:
    """Have a folder alone until the file given is closed."""
    file = open(folder / ".lock", "w")  # noqa: SIM115
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise RuntimeError(f"another process keeps its checkpoints in {folder}") from None
    return file


def before(path: Path, files: Sequence[Path]) -> str:
    """What follows from a damaged checkpoint among these, oldest first."""
    return "the one before it is tried" if path != files[0] else "and there is none before it"


def rename_damaged(damaged: Sequence[Path]) -> None:
    """Let damaged checkpoints be none any more, but stay for somebody to look at."""
    for path in damaged:
        renamed = path.with_name(f"{path.name}.damaged")
        if renamed.is_dir():
            shutil.rmtree(renamed)
        os.replace(path, renamed)
