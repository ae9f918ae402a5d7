"""Checkpoint files: a tree of Python values in one safetensors file, protected by a hash.

A tree consists of dicts, lists, tuples, numbers, strings, tensors and numpy arrays. Tensors and arrays are stored as
tensors of the safetensors file; everything else is stored as JSON in the header of the file. A file is written under a
temporary name, flushed to disk and then renamed, so that an interrupted write never leaves a partial checkpoint. The
header contains a SHA-256 of the whole content, by which `read_tree` detects later damage.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock, Timeout
from torch import Tensor

from .atomic_write import write_with

FORMAT = "cadam online 3"
SAFETENSORS_REQUIRED = "checkpoints need safetensors: pip install safetensors"


class DamagedCheckpointError(ValueError):
    """The content of a checkpoint differs from what was written."""


def pack_tree(tree: Any, tensors: dict[str, Tensor], name: str = "") -> Any:
    """Convert a tree to JSON-compatible values and collect its tensors.

    Args:
        tree: the values to convert.
        tensors: receives every tensor and array of the tree, by its path in the tree.
        name: the path of `tree` inside the tree that is being packed.

    Returns:
        Values that `json.dumps` accepts and that `unpack_tree` converts back.

    Raises:
        TypeError: if the tree contains a value or a key that a checkpoint cannot store.
    """
    if isinstance(tree, Tensor):
        tensors[name] = tree.detach().cpu().contiguous()
        return {"tensor": name}
    if isinstance(tree, np.ndarray):
        if tree.dtype == object:
            text = json.dumps(tree.tolist()).encode()
            tensors[name] = torch.from_numpy(np.frombuffer(text, dtype=np.uint8).copy())
            return {"objects": name}
        tensors[name] = torch.from_numpy(np.array(tree, order="C"))
        return {"array": name}
    if isinstance(tree, Mapping):
        return {"dict": [[_check_key(key, name), pack_tree(tree[key], tensors, f"{name}/{key}")] for key in tree]}
    if isinstance(tree, (list, tuple)):
        kind = "tuple" if isinstance(tree, tuple) else "list"
        return {kind: [pack_tree(value, tensors, f"{name}/{i}") for i, value in enumerate(tree)]}
    if isinstance(tree, torch.dtype):
        return {"dtype": str(tree).removeprefix("torch.")}
    if isinstance(tree, np.generic):
        return tree.item()
    if tree is None or isinstance(tree, (bool, int, float, str)):
        return tree
    raise TypeError(f"{name or 'the state'} is a {type(tree).__name__}, which a checkpoint cannot store")


def _check_key(key: Any, name: str) -> str | int:
    if isinstance(key, (str, int)):
        return key
    raise TypeError(f"{name or 'the state'} has the key {key!r}; keys in a checkpoint must be strings or integers")


def unpack_tree(packed: Any, tensors: Mapping[str, Tensor] | None) -> Any:
    """Convert the result of `pack_tree` back to the original tree; without `tensors`, these and arrays are None."""
    if not isinstance(packed, dict):
        return packed
    ((kind, value),) = packed.items()
    if kind in ("tensor", "array", "objects"):
        return None if tensors is None else _unpack_tensor(kind, tensors[value])
    if kind == "dict":
        return {key: unpack_tree(entry, tensors) for key, entry in value}
    if kind in ("list", "tuple"):
        entries = [unpack_tree(entry, tensors) for entry in value]
        return tuple(entries) if kind == "tuple" else entries
    if kind == "dtype" and isinstance(dtype := getattr(torch, value), torch.dtype):
        return dtype
    raise ValueError(f"{kind!r} with {value!r} is unknown")


def _unpack_tensor(kind: str, tensor: Tensor) -> Any:
    if kind == "tensor":
        return tensor
    if kind == "array":
        return tensor.numpy()
    objects = json.loads(tensor.numpy().tobytes())
    array = np.empty(len(objects), dtype=object)
    array[:] = objects
    return array


def write_tree(path: Path, tree: Any) -> None:
    """Write a tree to a file atomically.

    Raises:
        OSError: if the file cannot be written. A file that existed before is then unchanged.
        TypeError: if the tree contains a value that a checkpoint cannot store.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    text = json.dumps(pack_tree(tree, tensors))
    storages: set[int] = set()
    for name, tensor in tensors.items():  # safetensors refuses tensors that share memory
        storage = tensor.untyped_storage()
        if storage.data_ptr() in storages or storage.nbytes() != tensor.nbytes:
            tensors[name] = tensor.clone()
        storages.add(storage.data_ptr())
    placeholder = secrets.token_hex(32)

    def write(new: Path) -> None:
        save_file(tensors, new, {"format": FORMAT, "tree": text, "sha256": placeholder})
        with open(new, "r+b") as file:
            header = file.read(int.from_bytes(file.read(8), "little"))
            file.seek(8 + header.index(placeholder.encode()))
            file.write(digest.result().encode())

    # The hash takes about as long as the rest, so another thread computes it meanwhile.
    with ThreadPoolExecutor(1) as pool:
        digest = pool.submit(hash_content, text, tensors)
        try:
            write_with(path, write, f".{path.name}.new")
        except SafetensorError as error:
            raise OSError(f"{path}: {error}") from error


def read_tree(path: Path) -> Any:
    """Read the tree that `write_tree` wrote.

    Raises:
        DamagedCheckpointError: if the file cannot be read, its content does not match its hash, or it has no tree.
        ImportError: if safetensors is not installed.
    """
    return _read(path)


def read_header(path: Path) -> Any:
    """Read the tree of `write_tree` without its tensors and arrays, which are None, and without checking its hash.

    Raises:
        DamagedCheckpointError: if the header cannot be read, or has no tree.
        ImportError: if safetensors is not installed.
    """
    return _read(path, header_only=True)


def _read(path: Path, header_only: bool = False) -> Any:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ImportError(SAFETENSORS_REQUIRED) from error
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = None if header_only else {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise DamagedCheckpointError(f"{path}: {error}") from error
    if metadata.get("format") != FORMAT:
        raise DamagedCheckpointError(f"{path}: its format is {metadata.get('format')!r}, not {FORMAT!r}")
    if tensors is not None and hash_content(metadata.get("tree", ""), tensors) != metadata.get("sha256"):
        raise DamagedCheckpointError(f"{path}: its content does not match the hash in its header")
    try:
        return unpack_tree(json.loads(metadata["tree"]), tensors)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedCheckpointError(f"{path}: its header does not describe a checkpoint: {error!r}") from error


@contextmanager
def expect_valid_content(what: Path | str) -> Iterator[None]:
    """Report values that are missing in an intact checkpoint or have another type as a DamagedCheckpointError.

    Args:
        what: the checkpoint, or the part of it that is being loaded.
    """
    try:
        yield
    except (LookupError, TypeError, AttributeError, OverflowError) as error:
        raise DamagedCheckpointError(
            f"{what} is not damaged, but its content is not that of a learner's checkpoint ({error!r}): move it away"
        ) from error


def check_like(value: Any, example: Any, name: str) -> None:
    """Check that a value of a checkpoint has the type of an example.

    A dict must have the keys of the example, and a list its length, with entries like those of the example.

    Raises:
        TypeError: if a value has another type.
        LookupError: if a key or an entry is missing.
    """
    if isinstance(example, (Mapping, list)) and isinstance(value, type(example)):
        for key in example if isinstance(example, Mapping) else range(len(example)):
            check_like(value[key], example[key], f"{name}/{key}")
    elif not isinstance(value, (int, float) if isinstance(example, (int, float)) else type(example)):
        raise TypeError(f"{name} is {type(value).__name__}, not {type(example).__name__}")


def hash_content(text: str, tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of a text and of the names, types, shapes and values of tensors on the CPU."""
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        if tensor.numel():
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def lock_folder(folder: Path) -> FileLock:
    """Lock a checkpoint folder for this process until the returned lock is released.

    Raises:
        RuntimeError: if another learner has locked the folder.
    """
    lock = FileLock(folder / ".lock", thread_local=False)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise RuntimeError(
            f"another process writes its checkpoints to {folder}: stop it, or choose another folder"
        ) from None
    return lock


def describe_fallback(path: Path, checkpoints: Sequence[Path]) -> str:
    """Describe in a log message what follows from a damaged checkpoint; `checkpoints` are sorted, oldest first."""
    return "trying the previous one" if path != checkpoints[0] else "and there is no older one"


def rename_damaged(damaged: Sequence[Path]) -> None:
    """Append ``.damaged`` to the names of checkpoints, so that they are no longer loaded but can be inspected."""
    for path in damaged:
        renamed = path.with_name(f"{path.name}.damaged")
        if renamed.is_dir():
            shutil.rmtree(renamed)
        os.replace(path, renamed)


def check_no_checkpoints(folder: Path, checkpoints: Sequence[Path]) -> None:
    """Raise if all checkpoints of a folder turned out to be damaged.

    The damaged checkpoints keep their names, so that every further attempt fails too: starting from scratch must be
    the decision of a person.

    Raises:
        DamagedCheckpointError: if `checkpoints`, none of which could be read, is not empty.
    """
    if checkpoints:
        raise DamagedCheckpointError(
            f"all {len(checkpoints)} checkpoints in {folder} are damaged: move them away to start from scratch"
        )
