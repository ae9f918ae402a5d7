"""The compiled index gives the rows that a dictionary would give, for any ids and any number of threads."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch

from cadam.native.structs import Words
from cadam.online.data.conversion import fnv1a, mix_splitmix64
from cadam.tables.id_index import SHARED_ROW, IdIndex
from cadam.tables.ids import Ids, convert_ids


def train(index: IdIndex, ids: Ids, row_limit: int = 1 << 20) -> Words:
    batch = index.find_for_training(ids)
    if batch.try_assign(row_limit) is None:
        batch.assign(row_limit)
    return batch.rows


class DictIndex:
    """An index like IdIndex, made of dictionaries and lists, without admission."""

    def __init__(self) -> None:
        self.rows: dict[int, int] = {}
        self.seen: dict[int, tuple[int, int, int]] = {}  # by row: time, frequency, step
        self.free: list[int] = []
        self.row_count, self.time, self.step = 1, 0, 0

    def train(self, ids: Ids, row_limit: int) -> list[int]:
        for id_ in dict.fromkeys(ids.tolist()):
            if id_ not in self.rows and (self.free or self.row_count < row_limit):
                if not self.free:
                    self.free.append(self.row_count)
                    self.row_count += 1
                self.rows[id_] = self.free.pop()
        for id_ in ids.tolist():
            row = self.rows.get(id_, SHARED_ROW)
            if row:
                self.seen[row] = self.time, self.seen.get(row, (0, 0, 0))[1] + 1, self.step
        return [self.rows.get(id_, SHARED_ROW) for id_ in ids.tolist()]

    def release(self, rows: set[int]) -> set[int]:
        gone = {id_ for id_, row in self.rows.items() if row in rows}
        for id_ in gone:
            del self.seen[self.rows[id_]], self.rows[id_]
        return gone

    def oldest(self, count: int, by_frequency: bool) -> set[int]:
        order = [(s[by_frequency], s[not by_frequency], row) for row, s in self.seen.items() if s[2] != self.step]
        return {row for _, _, row in sorted(order)[:count]}


@pytest.mark.parametrize("by_frequency", [False, True])
def test_rows_are_those_of_a_dictionary_through_growth_expiry_and_eviction(by_frequency: bool) -> None:
    random = np.random.default_rng(0)
    index, expected = IdIndex(), DictIndex()
    special = np.array([0, 2**64 - 1, 2**63, 1], np.uint64)
    limit = 700
    for step in range(300):
        index.time = expected.time = step // 3
        ids = np.concatenate([special, random.zipf(1.3, 80).astype(np.uint64) + np.uint64(step)])
        if step % 7 == 0:
            released = index.expire(step // 3 - 20)
            old = {row for row, seen in expected.seen.items() if seen[0] < step // 3 - 20 and seen[2] != expected.step}
            assert released == len(expected.release(old))
            expected.free = free_rows(index)
        if step % 5 == 0 and len(index) > 400:
            rows = expected.oldest(30, by_frequency)
            assert index.evict(30, by_frequency=by_frequency) == len(rows)
            expected.release(rows)
            assert set(free_rows(index)) >= rows
            expected.free = free_rows(index)
        assert train(index, ids, limit).tolist() == expected.train(ids, limit)
        index.finish_step()
        expected.step += 1
        assert len(index) == len(expected.rows)
        assert index.row_count == expected.row_count
        known = np.array([*expected.rows, 12345678901234567], np.uint64)
        assert index.find(known).tolist() == [*expected.rows.values(), SHARED_ROW]
    assert index.row_count == limit  # The table was full at some point.


def free_rows(index: IdIndex) -> list[int]:
    """Return the free rows; the last one is used next."""
    state, rows = index.state_dict(), []
    row = state["first_free"]
    while row:
        rows.append(row)
        row = int(state["id"][row])
    assert len(rows) == index.free_count
    return rows[::-1]


def test_any_number_of_threads_gives_the_same_index() -> None:
    ids = np.random.default_rng(0).integers(0, 50_000, 200_000).astype(np.uint64)
    threads, states = torch.get_num_threads(), []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            index = IdIndex(admit_after=3, sketch_width=1 << 12)
            rows = [train(index, part) for part in np.split(ids, 4)]
            states.append((np.concatenate(rows), index.state_dict()))
    finally:
        torch.set_num_threads(threads)
    assert (states[0][0] == states[1][0]).all()
    assert states[0][1]["checksum"] == states[1][1]["checksum"]


def test_an_id_is_admitted_in_the_batch_in_which_it_was_seen_often_enough() -> None:
    index = IdIndex(admit_after=3, sketch_width=1 << 10)
    assert train(index, np.array([7, 8], np.uint64)).tolist() == [0, 0]
    assert train(index, np.array([7, 9], np.uint64)).tolist() == [0, 0]
    assert train(index, np.array([9, 7, 9, 8, 7], np.uint64)).tolist() == [1, 2, 1, 0, 2]


def test_the_sketch_never_counts_too_little_and_forgets() -> None:
    index = IdIndex(admit_after=2, sketch_width=1 << 10)
    once = np.arange(500, dtype=np.uint64)
    train(index, once)
    assert (train(index, once) > 0).all()
    other = np.array([10**6], np.uint64)
    train(index, other)
    for start in range(0, 1024, 512):  # a window of sightings, which halves all counters
        train(index, np.arange(2 * 10**6 + start, 2 * 10**6 + start + 512, dtype=np.uint64))
    index = copy.deepcopy(index)
    added = index.state_dict()["sketch_added"]
    assert added < 1024


def test_rows_that_the_next_step_needs_are_not_evicted() -> None:
    index = IdIndex()
    train(index, np.arange(10, dtype=np.uint64))
    index.finish_step()
    train(index, np.arange(6, dtype=np.uint64))
    index.time = 100
    assert index.evict(8, by_frequency=False) == 4
    assert index.expire(100) == 0
    assert (index.find(np.arange(10, dtype=np.uint64)) > 0).sum() == 6


def test_texts_have_the_hashes_of_feature_hashing() -> None:
    texts = ["", "a", "ann", "häuser", "日本", "x" * 10_000, "a\0b"]
    hashed = mix_splitmix64(np.array([fnv1a(text.encode()) for text in texts], np.uint64))
    assert convert_ids(texts)[0].tolist() == hashed.tolist()
    assert convert_ids(np.array(texts))[0].tolist() == hashed.tolist()


def test_all_forms_of_an_integer_are_the_same_id() -> None:
    largest = 2**64 - 1
    assert convert_ids([largest, -1, 0])[0].tolist() == [largest, largest, 0]
    assert convert_ids(torch.tensor([-1, 5], dtype=torch.int32))[0].tolist() == [largest, 5]
    assert convert_ids(torch.tensor([largest, 5], dtype=torch.uint64))[0].tolist() == [largest, 5]
    ids, shape = convert_ids(np.array([[-1], [5]], np.int8))
    assert ids.tolist() == [largest, 5]
    assert shape == (2, 1)
    assert convert_ids(torch.tensor([[1, 2], [3, 4]]).t())[0].tolist() == [1, 3, 2, 4]
    assert convert_ids([])[1] == (0,)
    assert convert_ids([np.int32(-1), 5, np.uint64(largest)])[0].tolist() == [largest, 5, largest]


class Column:
    """An object that numpy can convert to an array, such as a column of a data frame."""

    def __init__(self, values: list[object]) -> None:
        self.values = values

    def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray:
        return np.array(self.values)


def test_columns_of_data_frames_are_ids() -> None:
    assert convert_ids(Column([-1, 5]))[0].tolist() == convert_ids([-1, 5])[0].tolist()
    assert convert_ids(Column(["ann", "bob"]))[0].tolist() == convert_ids(["ann", "bob"])[0].tolist()
    with pytest.raises(TypeError, match="got float"):
        convert_ids(Column([1, math.nan]))


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        ([2**64], ValueError, "18446744073709551616 does not fit into 64 bits"),
        ([-(2**63) - 1], ValueError, "does not fit into 64 bits"),
        ([1.5], TypeError, "integers or all texts, got float"),
        ([1, "a"], TypeError, "got int, str"),
        ([None], TypeError, "got NoneType"),
        ([True], TypeError, "got bool"),
        ("abc", TypeError, "a sequence, got str"),
        (torch.tensor([1.0]), TypeError, "torch.float32"),
        (torch.tensor([True]), TypeError, "torch.bool"),
        (torch.tensor([1]).to_sparse(), TypeError, "torch.sparse_coo"),
        ([[1, 2], [3]], ValueError, "equal lengths"),
        ([bytearray(b"ab")], TypeError, "got bytearray"),
        (np.array([0], "datetime64[ns]"), TypeError, r"datetime64\[ns\]"),
        (np.ma.array([1, 2], mask=[False, True]), TypeError, "a masked array with missing values"),
        (["\ud800"], ValueError, "cannot be encoded as UTF-8"),
    ],
)
def test_what_is_not_an_id_is_refused(ids: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        convert_ids(ids)


# Checkpoints ---------------------------------------------------------------------------------------------------


def filled_index() -> IdIndex:
    index = IdIndex()
    train(index, np.arange(100, dtype=np.uint64))
    index.finish_step()
    index.evict(30, by_frequency=False)
    return index


def test_a_loaded_index_continues_like_the_original() -> None:
    index = filled_index()
    other = IdIndex().loaded(index.state_dict())
    ids = np.arange(50, 250, dtype=np.uint64)
    assert train(index, ids).tolist() == train(other, ids).tolist()
    assert index.state_dict()["checksum"] == other.state_dict()["checksum"]


@pytest.mark.parametrize("name", ["id", "last_seen", "frequency", "first_free", "time", "sketch", "checksum"])
def test_a_damaged_index_is_refused(name: str) -> None:
    state = filled_index().state_dict()
    missing = {key: value for key, value in state.items() if key != name}
    with pytest.raises(ValueError, match=f"no {name}"):
        IdIndex().loaded(missing)
    if name == "sketch":
        state[name] = torch.zeros(4, 8, dtype=torch.uint16)
    elif isinstance(state[name], torch.Tensor):
        state[name].view(torch.uint8)[40] += 1
    else:
        state[name] += 1
    with pytest.raises(ValueError, match="checksum"):
        IdIndex().loaded(state)


@pytest.mark.parametrize("contradiction", ["two rows of one id", "a free row that is in use", "a lost free row"])
def test_records_that_contradict_each_other_are_refused(contradiction: str) -> None:
    index = filled_index()
    used = np.flatnonzero(index._rows["frequency"][: index.row_count])
    if contradiction == "two rows of one id":
        index._rows["id"][used[0]] = index._rows["id"][used[1]]
    elif contradiction == "a free row that is in use":
        index._rows["frequency"][int(index._index["first_free"])] = 1
    else:
        index._rows["frequency"][used[0]] = 0
    with pytest.raises(ValueError, match="contradict"):
        IdIndex().loaded(index.state_dict())
