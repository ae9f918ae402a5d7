"""Parse texts in Criteo's format under AddressSanitizer, from buffers of exactly their size.

test_ctr_data.py starts this script with the sanitizer preloaded; it does not import torch. With the argument
``overread`` it passes a size that is too large, which the sanitizer must report.
"""

from __future__ import annotations

import ctypes
import sys

import numpy as np

LINE = b"1\t" + b"\t".join([b"-2147483648"] * 12 + [b""] + [b"0a1b2c3d"] * 26) + b"\n"


def criteo(c: ctypes.CDLL, text: bytes, lines: int, lie: int = 0) -> int:
    characters = np.frombuffer(text, np.uint8).copy()
    labels, values = np.empty(lines, np.uint8), np.empty(39 * lines, np.uint32)
    valid, missing = np.empty(39 * ((lines + 7) // 8), np.uint8), np.empty(39, np.int64)
    pointers = [array.ctypes.data for array in (labels, values, valid, missing)]
    return c.read_criteo(characters.ctypes.data, len(text) + lie, lines, *pointers)


def main(library: str, mode: str) -> None:
    c = ctypes.CDLL(library)
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    c.read_criteo.argtypes = [pointer, number, number, pointer, pointer, pointer, pointer]
    if mode == "overread":
        criteo(c, LINE, 1, lie=1)
    for lines in (0, 1, 7, 8, 9):
        assert criteo(c, LINE * lines, lines) == 1
        assert criteo(c, LINE * (lines + 1), lines) == 0
        assert criteo(c, LINE * lines, lines + 1) == 0
    for length in range(1, len(LINE)):
        for text in (LINE[:length], LINE[:length] + b"\n", LINE + LINE[:length], LINE[:length] + LINE):
            assert criteo(c, text, 2) == 0
    print("clean")


if __name__ == "__main__":
    main(*sys.argv[1:])
