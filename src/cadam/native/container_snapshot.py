"""Snapshots of the objects in dicts and lists, to notice when one was replaced, added or removed.

The state of an optimizer has a dict for each parameter. Comparing thousands of them in Python takes longer than a step,
so compiled code does it through Python's C API, where it is available.
"""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Sequence
from functools import cache
from itertools import chain
from operator import is_
from typing import Any

import numpy as np

from .loader import UnavailableError, package_library
from .structs import TRACKED_CONTAINER, Words

PYTHON_FUNCTIONS = ("PyDict_Next", "PyList_Size", "PyList_GetItem", "PyEval_SaveThread", "PyEval_RestoreThread")
"""Functions of Python's C API, in the order of the struct python_functions of native/src/structs.h."""


class ContainerSnapshot:
    """The objects that some dicts and lists contain.

    Attributes:
        records: The containers as C structs.
    """

    def __init__(self, containers: Sequence[dict[Any, Any] | list[Any]], ignored_keys: Collection[str] = ()) -> None:
        """Take a snapshot.

        Args:
            containers: The dicts and lists. The keys of dicts are not compared, only their values and the order.
            ignored_keys: The keys of dicts whose values may be replaced.
        """
        self._ignored_keys = ignored_keys
        self.records = np.zeros(len(containers), TRACKED_CONTAINER)
        self._entries: list[Any] = [None] * len(containers)
        if ignored_keys:
            for index, container in enumerate(containers):
                self.track(index, container)
        else:
            self._track_all(containers)
        try:
            self._compare: Any = package_library().locked.cadam_are_containers_unchanged
        except UnavailableError:
            self._compare = None
        # Reading the address of a numpy array takes about a microsecond, so it is read once.
        self._arguments = python_functions().ctypes.data, self.records.ctypes.data, len(self.records)

    def _track_all(self, containers: Sequence[dict[Any, Any] | list[Any]]) -> None:
        """Take a snapshot of all containers with one array for the addresses of their values."""
        are_dicts = [isinstance(container, dict) for container in containers]
        values = [list(c.values() if is_dict else c) for c, is_dict in zip(containers, are_dicts, strict=True)]  # type: ignore[union-attr]
        counts = np.fromiter(map(len, values), np.int64, len(values))
        ids = np.fromiter(map(id, chain.from_iterable(values)), np.int64, counts.sum())
        starts = np.cumsum(counts) - counts
        self.records["object"] = np.fromiter(map(id, containers), np.int64, len(containers))
        self.records["is_dict"] = are_dicts
        self.records["count"] = counts
        self.records["expected"] = ids.ctypes.data + ids.itemsize * starts
        splits = [ids[start : start + count] for start, count in zip(starts, counts, strict=True)]
        self._entries = list(zip(containers, values, splits, strict=True))

    def track(self, index: int, container: dict[Any, Any] | list[Any]) -> None:
        """Replace one of the containers, and take a snapshot of it."""
        values = list(container.values() if isinstance(container, dict) else container)
        ids = np.fromiter(map(id, values), np.int64, len(values))
        if isinstance(container, dict) and self._ignored_keys:
            ids[[key in self._ignored_keys for key in container]] = 0
        self.records[index] = id(container), isinstance(container, dict), len(ids), ids.ctypes.data
        # The values are kept, because Python may give the address of a deleted object to a new one.
        self._entries[index] = container, values, ids

    def is_unchanged(self) -> bool:
        """Whether all containers have the same values in the same order."""
        if self._compare is not None:
            return bool(self._compare(*self._arguments))
        return all(map(self._is_unchanged, self._entries))

    def _is_unchanged(self, entry: Any) -> bool:
        container, values, ids = entry
        now = list(container.values() if isinstance(container, dict) else container)
        if len(now) != len(values):
            return False
        return all(map(is_, now, values)) or all(
            old is new or not tracked for old, new, tracked in zip(now, values, ids.tolist(), strict=True)
        )


@cache
def python_functions() -> Words:
    """Return the addresses of PYTHON_FUNCTIONS."""
    addresses = [ctypes.cast(ctypes.pythonapi[name], ctypes.c_void_p).value for name in PYTHON_FUNCTIONS]
    return np.array(addresses, np.int64)
