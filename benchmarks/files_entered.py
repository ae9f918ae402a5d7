"""Count the files of the package that common operations enter: a measure of how far a reader has to travel.

A profiler hook records the file of every Python function that is called. `run` and `ab` are the commands on a small CSV
file of simulated clicks.

    python benchmarks/files_entered.py [--list]
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import inspect
import io
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import cadam

PACKAGE = str(Path(cadam.__file__).parent)


@contextlib.contextmanager
def recorded(files: set[str]) -> Iterator[None]:
    """Add the files of the package in which a function is called to `files`.

    Modules and class bodies are executed when they are imported; unlike functions, they are not optimized code.
    """

    def note(frame: FrameType, event: str, argument: Any) -> None:
        is_function = bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED)
        if event == "call" and is_function and frame.f_code.co_filename.startswith(PACKAGE):
            files.add(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)


def dense_steps(folder: Path) -> dict[str, Callable[[], object]]:
    """Return the first and a later step of an optimizer with four dense parameters."""
    params = [torch.nn.Parameter(torch.ones(8)) for _ in range(4)]
    for param in params:
        param.grad = torch.ones(8)
    optimizer = cadam.CAdam(params)
    return {"dense CPU step, first": optimizer.step, "dense CPU step, later": optimizer.step}


def sparse_steps(folder: Path) -> dict[str, Callable[[], object]]:
    """Return the first and a later step of an optimizer with one embedding table."""
    table = torch.nn.Parameter(torch.ones(10, 4))
    ids = torch.tensor([[1, 3]])
    table.grad = torch.sparse_coo_tensor(ids, torch.ones(2, 4), table.shape, check_invariants=True)
    optimizer = cadam.CAdam([table])
    return {"sparse CPU step, first": optimizer.step, "sparse CPU step, later": optimizer.step}


def write_clicks(path: Path, events: int) -> None:
    """Write a CSV file of clicks that depend on the user and the item."""
    generator = random.Random(0)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["user", "item", "price", "click"])
        for _ in range(events):
            user, item = generator.randrange(50), generator.randrange(20)
            writer.writerow([f"u{user}", f"i{item}", generator.random(), int(generator.random() < (user + item) / 70)])


def run_command(folder: Path) -> dict[str, Callable[[], object]]:
    """Return `cadam run` on a small file."""
    from cadam.cli.main import main

    write_clicks(folder / "clicks.csv", 4000)
    arguments = ["run", str(folder / "clicks.csv"), "--label", "click", "--checkpoint", str(folder / "run")]
    return {"cadam run": lambda: main(arguments)}


def ab_command(folder: Path) -> dict[str, Callable[[], object]]:
    """Return `cadam ab` on a small file."""
    from cadam.cli.main import main

    write_clicks(folder / "clicks.csv", 4000)
    arguments = ["ab", str(folder / "clicks.csv"), "--label", "click", "--lr", "0.01,0.003", "--seeds", "2"]
    arguments += ["--output", str(folder / "ab.html"), "--cache", str(folder / "cache")]
    return {"cadam ab": lambda: main(arguments)}


OPERATIONS = {"dense": dense_steps, "sparse": sparse_steps, "run": run_command, "ab": ab_command}


def main() -> None:
    """Print the number of files for each operation, each measured in a process that has done nothing before."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("operations", nargs="*", choices=[*OPERATIONS, []], help="default: all, one process each")
    parser.add_argument("--list", action="store_true", help="also print the names of the files")
    arguments = parser.parse_args()
    if not arguments.operations:
        for name in OPERATIONS:
            subprocess.run([sys.executable, __file__, name, *["--list"] * arguments.list], check=True)
    for name in arguments.operations:
        with tempfile.TemporaryDirectory() as folder:
            for title, operation in OPERATIONS[name](Path(folder)).items():
                files: set[str] = set()
                with contextlib.redirect_stdout(io.StringIO()), recorded(files):
                    operation()
                print(f"{title:24} {len(files):3} files")
                if arguments.list:
                    print("".join(f"    {Path(file).relative_to(PACKAGE)}\n" for file in sorted(files)), end="")


if __name__ == "__main__":
    main()
