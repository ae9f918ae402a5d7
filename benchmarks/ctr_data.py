"""How fast clicks are generated, and how fast and in how much memory Criteo's format is preprocessed.

    python benchmarks/ctr_data.py write /tmp/train.txt --rows 5000000
    python benchmarks/ctr_data.py preprocess /tmp/train.txt [--rows 1000000]
    python benchmarks/ctr_data.py generate [--device cuda]

Peak memory is that of the whole process, torch and pyarrow included.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import tempfile
import time
from pathlib import Path

import torch

from cadam_paper.ctr.criteo_writer import write
from cadam_paper.ctr.fields import FIELDS
from cadam_paper.ctr.generator import Generated, best_auc
from cadam_paper.ctr.preprocess import Stage, preprocess

BATCH = 10_000


def write_file(path: Path, rows: int) -> None:
    if path.exists():
        raise FileExistsError(f"{path} is there already: it may be Criteo's own")
    began = time.perf_counter()
    write(Generated(), path, rows)
    report("written", rows, time.perf_counter() - began)


def preprocess_file(path: Path, rows: int | None) -> None:
    ended: dict[Stage, float] = {}
    folder = Path(tempfile.mkdtemp(prefix="ctr-", dir=path.parent))
    began = time.perf_counter()
    try:
        manifest = preprocess(
            path,
            folder,
            rows=rows,
            report=lambda stage, share, rows: ended.update({stage: time.perf_counter() - began}),
        )
        seconds = time.perf_counter() - began
        kept = {part: sum(f.stat().st_size for f in folder.glob(part)) for part in ("tokens/*", "ids.i32")}
    finally:
        shutil.rmtree(folder)
    report("preprocessed", manifest.rows, seconds)
    print("stages ended after", {stage: f"{at:.1f} s" for stage, at in ended.items()})
    print("bytes a row:", {part: round(size / manifest.rows) for part, size in kept.items()})


def generate(device: torch.device, batches: int) -> None:
    clicks = Generated()
    feed = clicks.feed("stream", BATCH, device=device)
    index = torch.zeros((), dtype=torch.int64, device=device)
    ids = torch.empty(BATCH, len(FIELDS), dtype=torch.int64, device=device)
    labels = torch.empty(BATCH, device=device)

    def step() -> None:
        feed.fill(index, ids, labels)
        index.add_(1)

    step()
    if device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        replay, wait = graph.replay, torch.cuda.synchronize
    else:
        replay, wait = step, lambda: None
    wait()
    began = time.perf_counter()
    for _ in range(batches):
        replay()
    wait()
    seconds = time.perf_counter() - began
    report(f"generated on {device}", batches * BATCH, seconds)
    print(f"{seconds / batches * 1000:.3f} ms for {BATCH:,} rows; threads: {torch.get_num_threads()}")
    print(f"best AUC on 500,000 rows: {best_auc(clicks, rows=500_000, device=device):.4f}")


def report(what: str, rows: int, seconds: float) -> None:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{what}: {rows:,} rows in {seconds:.1f} s, {rows / seconds:,.0f} rows/s, peak memory {peak:,.0f} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["write", "preprocess", "generate"])
    parser.add_argument("path", type=Path, nargs="?", help="Criteo's file, to be written or preprocessed")
    parser.add_argument("--rows", type=int, help="number of rows (default: all)")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--batches", type=int, default=50)
    options = parser.parse_args()
    if options.what == "generate":
        generate(options.device, options.batches)
        return
    if options.path is None:
        parser.error(f"{options.what} needs a path")
    if options.what == "write":
        write_file(options.path, options.rows or 5_000_000)
    else:
        preprocess_file(options.path, options.rows)


if __name__ == "__main__":
    main()
