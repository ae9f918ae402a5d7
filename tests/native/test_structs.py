"""The numpy dtypes of native/structs.py have the layout that the C compiler gave to their structs."""

from __future__ import annotations

import ctypes

import pytest

from cadam.native import loader, structs


class FieldLayout(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("offset", ctypes.c_int64), ("size", ctypes.c_int64))


def c_layout() -> dict[str, tuple[int, int]]:
    """Return offset and size of every struct and field, as compiled."""
    function = loader.package_library().c.cadam_struct_layout
    function.restype = ctypes.POINTER(FieldLayout)
    entries, layout = function(), {}
    for entry in entries:
        if entry.name is None:
            break
        layout[entry.name.decode()] = entry.offset, entry.size
    return layout


def numpy_layout() -> dict[str, tuple[int, int]]:
    layout = {}
    for name, dtype in structs.STRUCTS.items():
        layout[name] = 0, dtype.itemsize
        for field, (kind, offset, *_) in dict(dtype.fields or {}).items():
            layout[f"{name}.{field}"] = offset, kind.itemsize
    return layout


def test_every_field_has_the_offset_and_size_of_the_c_struct() -> None:
    try:
        compiled = c_layout()
    except loader.UnavailableError as error:
        pytest.skip(str(error))
    assert numpy_layout() == compiled
