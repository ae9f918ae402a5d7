"""Processes that train a table on a generated stream, are killed at random moments, and continue from their last file.

    python killed_process.py FOLDER KILLS

The stream is read once without interruption, and then again and again until KILLS kills have happened. Each time the
stream ends, a line is printed with the counters of the table and a hash of everything that must be equal: the table,
its optimizer and the loss of each batch.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch

import cadam
from cadam.tables import DynamicEmbedding

BATCHES = 120


def new_table() -> tuple[DynamicEmbedding, torch.optim.Optimizer]:
    table = DynamicEmbedding(
        4, max_rows=1000, admit_after=2, sketch_width=1 << 12, expire_after=15, chunk_rows=64, seed=1
    )
    optimizer = cadam.CAdam(table.parameters(), lr=0.01, moments="int8")
    table.attach(optimizer)
    return table, optimizer


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids, most of them from a part of the catalog that moves, and labels."""
    random = np.random.default_rng(number)
    ids = np.concatenate([random.integers(0, 1200, 240) + 12 * number, random.integers(0, 50, 16)])
    return torch.from_numpy(ids), torch.from_numpy((ids % 3 == 0).astype(np.float32))


def learn(table: DynamicEmbedding, optimizer: torch.optim.Optimizer, number: int) -> float:
    ids, labels = batch(number)
    table.advance(number + 20 * (number // 40))  # Time passes without events twice.
    optimizer.zero_grad()
    loss = torch.nn.functional.binary_cross_entropy_with_logits(table(ids).sum(1), labels)
    loss.backward()
    optimizer.step()
    return loss.item()


def save(state: dict[str, Any], path: Path) -> None:
    """Write a file that is complete or absent."""
    unfinished = path.with_suffix(".unfinished")
    torch.save(state, unfinished)
    os.replace(unfinished, path)


def digest(state: object) -> bytes:
    """Return a hash of nested containers of tensors and numbers."""
    if isinstance(state, torch.Tensor):
        return hashlib.sha256(state.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data).digest()
    if isinstance(state, dict):
        state = [item for pair in state.items() for item in pair]
    if isinstance(state, list | tuple):
        return hashlib.sha256(b"".join(map(digest, state))).digest()
    return hashlib.sha256(repr(state).encode()).digest()


def train(folder: Path) -> None:
    """Train to the end of the stream, and write the result to a file."""
    table, optimizer = new_table()
    losses: list[float] = []
    path = folder / "table.pt"
    if path.exists():
        saved = torch.load(path)
        table.load_state_dict(saved["table"])
        optimizer.load_state_dict(saved["optimizer"])
        losses = saved["losses"]
    for number in range(len(losses), BATCHES):
        losses.append(learn(table, optimizer, number))
        if number % 3 == 0:
            save({"table": table.state_dict(), "optimizer": optimizer.state_dict(), "losses": losses}, path)
    result = digest([table.state_dict(), optimizer.state_dict(), losses]).hex()
    (folder / "result").write_text(f"{len(table.chunks)} {tuple(table.counters())} {result}")


def start(folder: Path) -> int:
    """Train in a child process, and return its number."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        train(folder)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def main(folder: Path, kills: int) -> None:
    random = np.random.default_rng(kills)
    seconds, run = 0.0, 0
    while kills or not run:
        place = folder / str(run)
        place.mkdir()
        while not (place / "result").exists():
            begin = time.perf_counter()
            child = start(place)
            if run and kills:
                time.sleep(random.uniform(0, seconds / 4))
                if not os.waitpid(child, os.WNOHANG)[0]:
                    os.kill(child, signal.SIGKILL)
                    assert os.waitpid(child, 0)[1] in (0, signal.SIGKILL)
                    kills -= 1
            else:
                assert os.waitpid(child, 0)[1] == 0
                seconds = seconds or time.perf_counter() - begin
        print((place / "result").read_text(), flush=True)
        run += 1


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]))
