"""Compare the index of DynamicEmbedding with public hash maps of C++ and with Python's dict, on one core.

Ids are random 64-bit integers. They are inserted in batches into empty maps, then looked up in another random order:
first in training, where the index of DynamicEmbedding also records time and frequency of each id, then in evaluation.
All contenders take turns within a round; the table shows medians over the rounds of the processor time, which other
processes disturb less than the time of the clock. absl (libabsl-dev) and boost
(libboost1.81-dev) are compiled here if they are installed, and left out otherwise. So is the managed collision of
TorchRec, which has a fixed number of rows, here one and a half for each id, and sorts its ids again every few batches
that insert or train; the time of `insert` does not include finding the rows. dict and managed collision take part in
the first round only. TorchRec's other kind, HashZchManagedCollisionModule, inserts on CUDA only.

    python benchmarks/id_index.py [--ids 10000000] [--rounds 5] [--batch 65536]
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cadam.tables.id_index import IdIndex

Arrays = list[np.ndarray[Any, np.dtype[np.uint64]]]


class Own:
    """The index of DynamicEmbedding."""

    def __init__(self) -> None:
        self.index = IdIndex()

    def insert(self, ids: Any) -> Any:
        batch = self.index.find_for_training(ids)
        if batch.try_assign(1 << 31) is None:
            batch.assign(1 << 31)
        return batch.rows

    def train(self, ids: Any) -> Any:
        return self.index.find_for_training(ids).rows

    def find(self, ids: Any) -> Any:
        return self.index.find(ids)

    def bytes(self) -> int:
        return self.index.nbytes


class Dict:
    """Python's dict."""

    def __init__(self) -> None:
        self.rows: dict[int, int] = {}

    def insert(self, ids: Any) -> Any:
        rows = self.rows
        return [rows.setdefault(id_, len(rows) + 1) for id_ in ids.tolist()]

    def find(self, ids: Any) -> Any:
        get = self.rows.get
        return [get(id_, 0) for id_ in ids.tolist()]

    def bytes(self) -> int:
        return sys.getsizeof(self.rows) + 64 * len(self.rows)  # an int object for each id and each row


class ManagedCollision:
    """TorchRec's MCHManagedCollisionModule, which remembers the least recent use of each id."""

    def __init__(self, ids: int, batches: int) -> None:
        from torchrec.modules.mc_modules import LRU_EvictionPolicy, MCHManagedCollisionModule

        self.size = ids * 3 // 2
        # All ids must have a row at the end of a pass.
        interval = next(count for count in range(min(10, batches), batches + 1) if batches % count == 0)
        policy, device = LRU_EvictionPolicy(), torch.device("cpu")
        self.slots = MCHManagedCollisionModule(self.size, device, policy, interval, 2**62)

    def insert(self, ids: Any) -> Any:
        self.slots.profile(_features(ids))
        self.slots.evict()
        return [1]

    def train(self, ids: Any) -> Any:
        self.insert(ids)
        return self.find(ids)

    def find(self, ids: Any) -> Any:
        rows = self.slots.remap(_features(ids))["item"].values()
        return (self.size - 1 - rows).numpy()  # ids without a row have the last one

    def bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.slots.buffers())


def _features(ids: Any) -> Any:
    from torchrec import JaggedTensor

    values = torch.from_numpy(ids.view(np.int64)) & (2**62 - 1)
    return {"item": JaggedTensor(values, lengths=torch.ones(len(ids), dtype=torch.int64))}


def compiled(name: str, number: int) -> Callable[[], Any] | None:
    """Return a class for a hash map of C++, or None if it is not installed."""
    library = Path(tempfile.mkdtemp()) / "map.so"
    source = Path(__file__).with_suffix(".cc")
    flags = ["-std=c++17", "-O3", "-DNDEBUG", "-shared", "-fPIC", f"-DMAP={number}"]
    libraries = ["-labsl_raw_hash_set", "-labsl_hash", "-labsl_city", "-labsl_low_level_hash"] if number == 1 else []
    command = ["c++", *flags, str(source), "-o", str(library), *libraries]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        print(f"{name} is left out, because it could not be compiled: {done.stderr.splitlines()[:1]}")
        return None
    c = ctypes.CDLL(str(library))
    c.create.restype, c.bytes.restype = ctypes.c_void_p, ctypes.c_int64
    c.destroy.argtypes, c.bytes.argtypes = [ctypes.c_void_p], [ctypes.c_void_p]
    for function in (c.insert, c.find):
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]

    class Map:
        def __init__(self) -> None:
            self.map = c.create()

        def __del__(self) -> None:
            c.destroy(self.map)

        def insert(self, ids: Any) -> Any:
            rows = np.empty(len(ids), np.int64)
            c.insert(self.map, ids.ctypes.data, len(ids), rows.ctypes.data)
            return rows

        def find(self, ids: Any) -> Any:
            rows = np.empty(len(ids), np.int64)
            c.find(self.map, ids.ctypes.data, len(ids), rows.ctypes.data)
            return rows

        def bytes(self) -> int:
            return int(c.bytes(self.map))

    return Map


def measure(make: Callable[[], Any], inserted: Arrays, looked_up: Arrays) -> dict[str, float]:
    """Return nanoseconds for each id, bytes for each id, and the longest time of a batch."""
    gc.collect()
    contender, count = make(), sum(map(len, inserted))
    results: dict[str, float] = {}
    for name, batches in (("insert", inserted), ("train", looked_up), ("find", looked_up)):
        function = getattr(contender, name, contender.find)
        times = []
        for ids in batches:
            start = time.process_time()
            rows = function(ids)
            times.append(time.process_time() - start)
            assert min(rows) > 0
        results[name] = 1e9 * sum(times) / count
        results[f"longest {name}"] = 1e3 * max(times)
    results["bytes"] = contender.bytes() / count
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ids", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=65536)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    random = np.random.default_rng(0)
    ids = np.unique(random.integers(0, 2**64, arguments.ids, np.uint64))
    orders = [random.permutation(ids), random.permutation(ids)]
    inserted, looked_up = (np.split(order, range(arguments.batch, len(ids), arguments.batch)) for order in orders)
    maps = {"absl::flat_hash_map": compiled("absl", 1), "boost::unordered_flat_map": compiled("boost", 2)}
    contenders = {"cadam IdIndex": Own, **{name: make for name, make in maps.items() if make}}
    slow: dict[str, Callable[[], Any]] = {"dict": Dict}
    if find_spec("torchrec") is not None:
        slow["managed collision"] = lambda: ManagedCollision(len(ids), len(inserted))
    results: dict[str, list[dict[str, float]]] = {name: [] for name in [*contenders, *slow]}
    for round_ in range(arguments.rounds):
        for name, make in (contenders | slow if round_ == 0 else contenders).items():
            results[name].append(measure(make, inserted, looked_up))
    median = {
        name: {key: statistics.median(run[key] for run in runs) for key in runs[0]} for name, runs in results.items()
    }
    print(f"{len(ids):,} random ids in random order, batches of {arguments.batch:,}, one core; medians of")
    print(f"{arguments.rounds} interleaved rounds. Nanoseconds for each id; longest: one batch of inserts.")
    print(f"{'':28}{'insert':>8}{'train':>8}{'find':>8}{'bytes/id':>10}{'longest ms':>12}")
    for name, m in median.items():
        print(
            f"{name:28}{m['insert']:8.0f}{m['train']:8.0f}{m['find']:8.0f}{m['bytes']:10.1f}{m['longest insert']:12.1f}"
        )
    own = median["cadam IdIndex"]
    for name in maps:
        if name in median:
            ratios = ", ".join(f"{key} {median[name][key] / own[key]:.2f}" for key in ("insert", "train", "find"))
            print(f"speed of the index against {name}: {ratios}")


if __name__ == "__main__":
    main()
