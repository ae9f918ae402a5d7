"""Run the C kernels under AddressSanitizer, on buffers that have exactly the required sizes.

It needs no torch; test_native.py starts it with the sanitizer preloaded. With the argument ``overrun`` it passes a
wrong size, which the sanitizer must notice.
"""

from __future__ import annotations

import ctypes
import sys
from itertools import product

import numpy as np

RANGE = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)
PARALLEL_FOR = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, RANGE, ctypes.c_void_p)


@PARALLEL_FOR
def in_two_parts(begin: int, end: int, grain: int, f: object, context: int) -> int:
    middle = (begin + end) // 2
    for part in ((begin, middle), (middle, end)):
        if part[0] < part[1]:
            f(*part, context)  # type: ignore[operator]
    return 0


SIZES = (4, 8, 2, 2)  # bytes of a parameter's element: float32, float64, bfloat16, float16
REALS = (4, 8, 4, 4)  # bytes of an element of its buffers


def block(n: int, size: int) -> np.ndarray:
    """Return n values in a separate allocation, all of them finite."""
    return np.frombuffer(np.random.default_rng(n).integers(60, 64, n * size, np.uint8).tobytes(), np.uint8).copy()


def dense(c: ctypes.CDLL, kernel: int, dtype: int, lengths: list[int], lie: int = 0) -> None:
    kept, rows = [], []
    for n in lengths:
        tensors = [block(n, size) for size in (SIZES[dtype], SIZES[dtype], *[REALS[dtype]] * 4)]
        step, counts = np.zeros(1, np.float32), np.zeros(3, np.int64)
        kept += [*tensors, step, counts]
        rows.append(
            [*(t.ctypes.data for t in tensors), step.ctypes.data, counts.ctypes.data, n + lie, kernel, dtype, *[0] * 5]
        )
    table, coefficients = np.array(rows, np.int64), np.full((1, 32), 0.5)
    assert c.cadam_dense_step(table.ctypes.data, len(rows), coefficients.ctypes.data, 1, 64, in_two_parts) == 0


def rows(c: ctypes.CDLL, kernel: int, dtype: int, height: int, width: int, ids: np.ndarray) -> int:
    tensors = [block(height * width, size) for size in (SIZES[dtype], *[REALS[dtype]] * 4)]
    grads, step, counts = block(len(ids) * width, SIZES[dtype]), np.zeros(1, np.float32), np.zeros(3, np.int64)
    pointers = [t.ctypes.data for t in (*tensors, step, counts)]
    table = np.array([*pointers, height, width, kernel, dtype, *[0] * 7, 1, 0, dtype, 0, 0], np.int64)
    coefficients, ids = np.full(32, 0.5), np.ascontiguousarray(ids, np.int64)
    squares, addresses = np.zeros(1), np.array([grads.ctypes.data, coefficients.ctypes.data])
    given = ids.ctypes.data, len(ids), grads.ctypes.data, squares.ctypes.data, 3, in_two_parts
    found = c.cadam_sparse_squared_norm(table.ctypes.data, *given)
    done = c.cadam_sparse_step(
        *(table.ctypes.data, 1, ids.ctypes.data, len(ids), addresses[:1].ctypes.data, addresses[1:].ctypes.data),
        *(3, in_two_parts),
    )
    assert (found < 0) == (done < 0)  # if several ids are invalid, each function may return any of them
    return done


def stored_dense(c: ctypes.CDLL, moments: int, dtype: int, lengths: list[int]) -> None:
    """Run Adam with smaller moments, and a scale for each 256 of them."""
    kernel, size = c.cadam_kernel_index(b"adam"), (4, 2, 1)[moments]
    kept, rows = [], []
    for n in lengths:
        tensors = [block(n, each) for each in (SIZES[dtype], SIZES[dtype], size, size)]
        scales, step = [block(-(-n // 256), 1) for _ in range(2)], np.zeros(1, np.float32)
        kept += [*tensors, *scales, step]
        given = [*(t.ctypes.data for t in tensors), 0, 0, step.ctypes.data, 0, n, kernel, dtype, 0]
        rows.append([*given, *(s.ctypes.data for s in scales), 1, moments])
    table, coefficients = np.array(rows, np.int64), np.full((1, 32), 0.5)
    assert c.cadam_dense_step(table.ctypes.data, len(rows), coefficients.ctypes.data, 1, 64, in_two_parts) == 0


def stored_rows(c: ctypes.CDLL, moments: int, dtype: int, by_row: bool, height: int, width: int) -> None:
    """Run Adam on rows with smaller moments, second moments by element or by row, and step counts of rows."""
    kernel, n, size = c.cadam_kernel_index(b"adam"), 3 * height, (4, 2, 1)[moments]
    ids = np.random.default_rng(n).integers(0, height, n)
    moment, second = block(height * width, size), block(height, 4) if by_row else block(height * width, size)
    tensors = [block(height * width, SIZES[dtype]), moment, second, np.zeros(0), np.zeros(0), np.zeros(1, np.float32)]
    scales, steps, set_of = [block(height, 1), block(height, 1)], np.zeros(height, np.int32), np.zeros(2, np.int32)
    own = [2 * by_row, steps.ctypes.data, set_of.ctypes.data, 1, 1]
    pointers = [t.ctypes.data for t in tensors]
    table = np.array(
        [*pointers, 0, height, width, kernel, dtype, *(s.ctypes.data for s in scales), 1, moments, *own, 0, 0, 0],
        np.int64,
    )
    coefficients = np.full(32, 0.5)
    for of_grads in {dtype, 0}:
        table[-3], grads, steps[:] = of_grads, block(n * width, SIZES[of_grads]), 0
        addresses = np.array([grads.ctypes.data, coefficients.ctypes.data])
        given = ids.ctypes.data, n, addresses[:1].ctypes.data, addresses[1:].ctypes.data, 3, in_two_parts
        assert c.cadam_sparse_step(table.ctypes.data, 1, *given) == -1


def events(c: ctypes.CDLL, kernel: int, places: int, bag: int, numbers: int, width: int, n: int) -> None:
    """Run a model of some columns, a list and some numbers, with tables that have no further rows."""
    random, height, bins = np.random.default_rng(n), 5 * (places + 1), 4
    rows, entries = height + (bins + 1) * numbers, places + bag
    kept: list[np.ndarray] = []

    def keep(array: np.ndarray) -> int:
        kept.append(array)
        return array.ctypes.data

    def part(count: int, wide: int, there: bool = True) -> list[int]:
        if not there:
            return [0] * 8
        blocks = [keep(np.full(count * wide, 0.01, np.float32)) for _ in range(5)]
        return [*blocks, keep(np.zeros(3, np.int64)), count, wide]

    shapes = ((rows, 1, True), (rows, width, width > 0), (1, 1, True), (1, numbers, numbers > 0))
    parts = [part(*shape) for shape in (*shapes, (1, numbers * width, numbers * width > 0))]
    field_of = np.array([*range(places), *[places] * bag, *range(places + 1, places + 1 + numbers)], np.int32)
    alike = np.array([*range(places), *[places] * bag, *range(entries, entries + numbers)], np.int32)
    starts = height + (bins + 1) * np.arange(numbers)
    sample_size, slot_stride, max_shift = 8, 3, 2
    samples = [keep(np.zeros(numbers, np.int64)), keep(np.full((numbers, sample_size), np.inf))]
    arrays = [keep(field_of), keep(alike), keep(starts)]
    inputs = [
        kernel,
        entries,
        places + (bag > 0),
        numbers,
        *arrays,
        bins,
        *samples,
        sample_size,
        slot_stride,
        max_shift,
    ]
    model = np.array([word for one in parts for word in one] + inputs, np.int64)
    ids = np.concatenate(
        [5 * np.arange(places) + random.integers(0, 5, (n, places)), 5 * places + random.integers(0, 5, (n, bag))], 1
    )
    values = random.normal(size=(n, numbers))
    values[random.random((n, numbers)) < 0.2] = np.nan
    given: list[np.ndarray] = [
        ids.astype(np.int64),
        np.full((n, entries), 0.5, np.float32),
        values,
        np.ones(n, np.float32),
    ]
    coefficients = np.full((n, 32), 0.5, np.float32)
    words = np.array([n, *map(keep, given), keep(coefficients), keep(np.zeros(n, np.float32))], np.int64)
    assert c.cadam_learn_per_event(model.ctypes.data, words.ctypes.data) == n
    assert c.cadam_score_events(model.ctypes.data, words.ctypes.data) == n


PIECES = [
    b'{"a":',
    b'"',
    b"\\",
    b",",
    b"}",
    b"{",
    b":",
    b" ",
    b"12",
    b"-",
    b".",
    b"1e5",
    b"null",
    b"true",
    b"fals",
    b"\r",
]
PIECES += [
    b"\xc3\xa9",
    b"\xe6\x97",
    b"\xf0\x9f\x98",
    b"\xff",
    b"\x00",
    b"abc",
    b'"b": "x"',
    b"9" * 30,
    b"x" * 130,
    b'"zz":1',
]


def texts(c: ctypes.CDLL, random: np.random.Generator, fields: int) -> None:
    """Parse lines of CSV or, without fields, JSON, made of pieces of both, and convert each value to each type."""
    made = [b"".join(PIECES[i] for i in random.integers(0, len(PIECES), random.integers(0, 12))) for _ in range(40)]
    names, columns, stride = b"ab", 2, 48
    sizes = np.array([len(line) for line in made])
    ends = np.cumsum(sizes)
    data = np.frombuffer(b"".join(made), np.uint8).copy()  # an allocation of exactly this size
    begin, spans = ends - sizes, np.full((2, columns, stride), -1)
    quoted, became = np.zeros((columns, stride), np.uint8), np.zeros(len(made), np.uint8)
    column_of = np.array([0, -1, 1][:fields] + [-1] * (fields - 3), np.int64)
    known, name_ends = np.frombuffer(names, np.uint8).copy(), np.array([1, 2])
    arrays = (data, begin, ends), (spans[0], spans[1], quoted, became)
    words = [
        *(a.ctypes.data for a in arrays[0]),
        len(made),
        *(a.ctypes.data for a in arrays[1]),
        columns,
        stride,
        fields,
    ]
    given = np.array([*words, column_of.ctypes.data, ord(","), known.ctypes.data, name_ends.ctypes.data])
    c.cadam_split_lines(given.ctypes.data)
    out, fine = np.zeros(len(made), np.int64), np.zeros(len(made), np.uint8)
    read = np.where(became == 1, spans[0, 0, : len(made)], -1)
    for starts, stops in ((begin, ends), (read, spans[1, 0, : len(made)].copy())):
        for how in range(3):
            for kind in range(3):
                words = [
                    data.ctypes.data,
                    starts.ctypes.data,
                    stops.ctypes.data,
                    quoted.ctypes.data,
                    len(made),
                    how,
                    kind,
                ]
                given = np.array([*words, 1000, 1, out.ctypes.data, fine.ctypes.data])
                c.cadam_read_values(given.ctypes.data)


def index(c: ctypes.CDLL, random: np.random.Generator, capacity: int, threshold: int) -> None:
    """Look up, admit, assign, evict and expire ids, with slots and records that have exactly the required sizes."""
    bits, new_bits, limit = 4, 3, capacity + 1
    slots, rows = np.zeros(1 << bits, np.uint64), np.zeros(3 * limit, np.uint64)
    sketch_bits, seen = 3, np.zeros(4 * 8, np.uint16)
    sketch = np.array([seen.ctypes.data, sketch_bits, 0, 40, threshold], np.int64)
    words = np.array([slots.ctypes.data, bits, rows.ctypes.data, 1, 0, 0, 0, 0], np.int64)
    for step in range(30):
        words[6:] = step
        n = int(random.integers(0, 20))
        ids, found = random.integers(0, 30, n).astype(np.uint64), np.zeros(n, np.int64)
        misses = c.cadam_index_find(words.ctypes.data, ids.ctypes.data, n, found.ctypes.data, 1, in_two_parts)
        new_ids, new_counts, new_rows = np.zeros(misses, np.uint64), *np.zeros((2, misses), np.int64)
        pointers = [x.ctypes.data for x in (new_ids, new_counts, new_rows)]
        batch = np.array([n, ids.ctypes.data, found.ctypes.data, misses, *pointers, 0, 0], np.int64)
        if misses:
            seen_before = sketch.ctypes.data if threshold > 1 else 0
            result = c.cadam_index_train(words.ctypes.data, seen_before, batch.ctypes.data, limit, limit)
            assert result in (0, 1)
            if result == 1:  # there is no room for all new ids
                c.cadam_index_assign(words.ctypes.data, batch.ctypes.data, limit)
        assert ((found >= 0) & (found < limit)).all()
        words[7] += 1
        c.cadam_index_evict(words.ctypes.data, int(random.integers(0, 4)), step % 2)
        c.cadam_index_expire(words.ctypes.data, step - 5)
    copied = np.zeros(1 << new_bits if capacity < 6 else 1 << bits, np.uint64)
    c.cadam_index_rehash(slots.ctypes.data, bits, copied.ctypes.data, len(copied).bit_length() - 1)
    rebuilt = np.zeros_like(copied)
    words[0], words[1] = rebuilt.ctypes.data, len(copied).bit_length() - 1
    assert c.cadam_index_build(words.ctypes.data) == -1
    assert sorted(rebuilt) == sorted(copied)
    values = np.zeros((n, 3), np.float32)
    c.cadam_initial_rows(ids.ctypes.data, n, 3, -1, 0.1, values.ctypes.data, in_two_parts)
    text, ends, hashes = np.frombuffer(b"abc", np.uint8).copy(), np.array([0, 2, 3]), np.zeros(3, np.uint64)
    c.cadam_hash_texts(text.ctypes.data, ends.ctypes.data, 3, hashes.ctypes.data)


def main(library: str, mode: str, kernels: str) -> None:
    c = ctypes.CDLL(library)
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    c.cadam_dense_step.argtypes = [pointer, number, pointer, number, number, PARALLEL_FOR]
    c.cadam_check_ids.argtypes = [pointer, number, number, PARALLEL_FOR]
    c.cadam_check_ids.restype = number
    c.cadam_sparse_step.argtypes = [pointer, number, pointer, number, pointer, pointer, number, PARALLEL_FOR]
    c.cadam_sparse_squared_norm.argtypes = [pointer, pointer, number, pointer, pointer, number, PARALLEL_FOR]
    c.cadam_sparse_step.restype = c.cadam_sparse_squared_norm.restype = number
    for each in (c.cadam_learn_per_event, c.cadam_score_events):
        each.argtypes, each.restype = [pointer, pointer], number
    random = np.random.default_rng(0)
    for n in (0, 1, 70_001):
        ids = random.integers(0, 9, n)
        assert c.cadam_check_ids(ids.ctypes.data, n, 9, in_two_parts) == -1
    for each in (c.cadam_split_lines, c.cadam_read_values):
        each.argtypes, each.restype = [pointer], None
    c.cadam_index_find.argtypes = [pointer, pointer, number, pointer, number, PARALLEL_FOR]
    c.cadam_index_evict.argtypes, c.cadam_index_expire.argtypes = [pointer, number, number], [pointer, number]
    c.cadam_index_train.argtypes = [pointer, pointer, pointer, number, number]
    c.cadam_index_assign.argtypes = [pointer, pointer, number]
    c.cadam_index_build.argtypes, c.cadam_index_rehash.argtypes = [pointer], [pointer, number, pointer, number]
    c.cadam_initial_rows.argtypes = [pointer, number, number, number, ctypes.c_double, pointer, PARALLEL_FOR]
    c.cadam_hash_texts.argtypes = [pointer, pointer, number, pointer]
    for each in (c.cadam_index_find, c.cadam_index_evict, c.cadam_index_train, c.cadam_index_build):
        each.restype = number
    for capacity, threshold in product((1, 5, 11), (1, 2, 3)):
        index(c, random, capacity, threshold)
    for fields in [0, 1, 2, 3, 7] * 60:
        texts(c, random, fields)
    if mode == "overrun":
        dense(c, 0, 0, [100], lie=1)
    for level in range(c.cadam_limit_instruction_set(-1) + 1):
        c.cadam_limit_instruction_set(level)
        for dtype, moments in product((0, 2, 3), range(3)):
            for by_row, width in product((False, True), (1, 3, 16, 31, 130, 1024)):
                stored_rows(c, moments, dtype, by_row, 50, width)
            if moments:
                stored_dense(c, moments, dtype, [1, 7, 255, 256, 257, 1000])
        for kernel in range(int(kernels)):
            for dtype in range(4):
                dense(c, kernel, dtype, [0, 1, 7, 63, 64, 65, 129, 1000])
                for height, width in ((1, 1), (5, 3), (70_000, 2), (300, 31), (9, 130)):
                    ids = random.integers(0, height, 200)
                    assert rows(c, kernel, dtype, height, width, ids) == -1
                    assert rows(c, kernel, dtype, height, width, ids[:0]) == -1
                    for bad in (-1, height, 2**62, -(2**63)):
                        assert rows(c, kernel, dtype, height, width, np.array([0, bad])) == 1
        for places, bag, numbers, width in ((1, 0, 0, 0), (9, 0, 0, 8), (3, 4, 2, 5), (0, 3, 1, 0), (2, 0, 3, 16)):
            for n in (0, 1, 40):
                events(c, 0, places, bag, numbers, width, n)
    print("clean")


if __name__ == "__main__":
    main(*sys.argv[1:])
