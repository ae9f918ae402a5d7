"""Files are replaced as a whole, and what a killed process has left is removed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from cadam.atomic_write import replace_file, write_with

KILLED_WRITER = """
import os, signal, sys
from pathlib import Path
from cadam.atomic_write import write_with

def write(path):
    path.write_bytes(b"part")
    os.kill(os.getpid(), signal.SIGKILL)

write_with(Path(sys.argv[1]), write)
"""


def test_the_next_write_removes_what_a_killed_process_has_left(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(b"old")
    command = [sys.executable, "-c", KILLED_WRITER, str(path)]
    assert subprocess.run(command, check=False, timeout=60).returncode == -signal.SIGKILL
    (leftover,) = tmp_path.glob(".model.*.new")
    assert path.read_bytes() == b"old"
    kept = [tmp_path / ".model.new", tmp_path / f".other.{'0' * 32}.new"]
    for file in kept:
        file.touch()
    replace_file(path, b"new")
    assert not leftover.exists()
    assert path.read_bytes() == b"new"
    assert all(file.exists() for file in kept)


def test_a_file_that_is_being_written_is_not_removed_by_another_write(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"

    def write(new: Path) -> None:
        new.write_bytes(b"first")
        code = "import sys; from pathlib import Path; from cadam.atomic_write import replace_file as r"
        subprocess.run([sys.executable, "-c", f"{code}; r(Path(sys.argv[1]), b'second')", path], check=True, timeout=60)
        assert new.read_bytes() == b"first"
        assert path.read_bytes() == b"second"

    write_with(path, write)
    assert path.read_bytes() == b"first"
    assert os.listdir(tmp_path) == ["model.pt"]
