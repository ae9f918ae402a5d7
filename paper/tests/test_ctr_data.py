"""Preprocessing of Criteo's format: parsing, split, vocabulary and encoding, with damaged files and interruptions."""

from __future__ import annotations

import gzip
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.native import sanitizer

from cadam.cli import main
from cadam.native import build
from cadam_paper.ctr import criteo_dataset as reading
from cadam_paper.ctr import criteo_parser as parsing
from cadam_paper.ctr import criteo_writer as text
from cadam_paper.ctr import preprocess as stages
from cadam_paper.ctr.criteo_dataset import Criteo
from cadam_paper.ctr.criteo_parser import find_error, hexadecimal, parse
from cadam_paper.ctr.criteo_writer import bucket, unbucket, write
from cadam_paper.ctr.fields import CATEGORIES, FIELDS, INTEGERS, offsets, scale_vocabulary
from cadam_paper.ctr.generator import Generated
from cadam_paper.ctr.preprocess import BadLinesError, Encoder, Manifest, bucketed, preprocess, vocabulary
from cadam_paper.ctr.split import folds, rows_of

pyarrow = pytest.importorskip("pyarrow")

CPU = torch.device("cpu")
ROWS = 6000
CLICKS = Generated(ROWS, scale_vocabulary(0.002))
GOOD = b"1\t" + b"\t".join([b"3"] * 13 + [b"0a1b2c3d"] * 26)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("criteo") / "train.txt"
    write(CLICKS, path)
    return path


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use small chunks, and skip the synchronization with the disk, which matters only after a loss of power."""
    monkeypatch.setattr(stages, "CHUNK", 200_000)
    monkeypatch.setattr(os, "fsync", lambda file: None)
    monkeypatch.setattr(os, "fdatasync", lambda file: None)


@pytest.fixture
def needs_c() -> None:
    if isinstance(reason := parsing.compiled(), str):
        pytest.skip(reason)


@pytest.fixture(params=["C", "pyarrow"])
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parse texts with the C code, and then with pyarrow."""
    if request.param == "C":
        request.getfixturevalue("needs_c")
    else:
        monkeypatch.setattr(parsing, "compiled", lambda: "not wanted")


@pytest.fixture(scope="module")
def short(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with the first 400 lines of the source and one invalid line."""
    path = tmp_path_factory.mktemp("short") / "train.txt"
    path.write_bytes(b"".join([*source.read_bytes().splitlines(keepends=True)[:400], b"bad\n"]))
    return path


def generated() -> tuple[np.ndarray, np.ndarray]:
    batch = next(CLICKS.stream(ROWS, device=CPU))
    return batch.ids.numpy(), batch.labels.numpy()


def everything(criteo: Criteo, part: str, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
    batches = list(criteo.batches(part, 700, device=CPU, **options))  # type: ignore[arg-type]
    return torch.cat([batch.ids for batch in batches]), torch.cat([batch.labels for batch in batches])


def files_of(folder: Path) -> dict[str, bytes]:
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != "lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


# From end to end -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
def test_a_generated_file_gives_the_generated_rows_back(source: Path, tmp_path: Path, packed: bool) -> None:
    path = source
    if packed:
        path = tmp_path / "train.txt.gz"
        path.write_bytes(gzip.compress(source.read_bytes()))
    criteo = Criteo(path, cache=tmp_path / "cache")
    assert len(criteo.manifest.chunks) > 3
    assert criteo.manifest.bad == 0
    batch = next(criteo.stream(ROWS, device=CPU))
    ids, labels = generated()
    np.testing.assert_array_equal(batch.labels, labels)
    train = np.zeros(ROWS, bool)
    train[criteo.rows("train")] = True
    starts = offsets(criteo.vocabulary)
    for column, name in enumerate(FIELDS):
        given = ids[:, column] - offsets(CLICKS.vocabulary)[column]
        read = batch.ids[:, column].numpy() - starts[column]
        counts = Counter(given[train].tolist())
        known = {token for token, count in counts.items() if count >= 10 and not (name in CATEGORIES and token == 0)}
        assert criteo.vocabulary[column] == 1 + len(known)
        pairs = set(zip(given.tolist(), read.tolist(), strict=True))
        for token, number in pairs:
            assert (number > 0) == (token in known), (name, token, number)
        renumbered = [(token, number) for token, number in pairs if number]
        assert len(renumbered) == len({number for _, number in renumbered}) == len(known)
        by_number = [counts[token] for token, _ in sorted(renumbered, key=lambda pair: pair[1])]
        assert by_number == sorted(by_number, reverse=True), "numbered from the most frequent to the rarest"


def test_the_cache_is_parquet_with_the_sources_hash(source: Path, tmp_path: Path) -> None:
    import hashlib

    from pyarrow import dataset, parquet

    criteo = Criteo(source, cache=tmp_path)
    digest = hashlib.sha256(source.read_bytes()).hexdigest()
    tokens = criteo.folder / "tokens"
    assert parquet.read_schema(tokens / "_common_metadata").metadata[b"sha256"].decode() == digest
    table = dataset.dataset(sorted(tokens.glob("*.parquet"))).to_table()
    lines = [line.split("\t") for line in source.read_text().splitlines()]
    assert table.column("label").to_pylist() == [int(line[0]) for line in lines]
    for place, name in enumerate(FIELDS, 1):
        base = 10 if name in INTEGERS else 16
        expected = [int(line[place], base) if line[place] else None for line in lines]
        assert table.column(name).to_pylist() == expected, name
    assert digest[:16] in criteo.description
    assert "train.txt, all lines, 6,000 rows" in criteo.description


def test_the_first_rows_equal_those_of_a_shorter_file(source: Path, tmp_path: Path) -> None:
    cut = tmp_path / "train.txt"
    cut.write_bytes(b"".join(source.read_bytes().splitlines(keepends=True)[:2500]))
    prefix, whole = Criteo(source, 2500, cache=tmp_path / "a"), Criteo(cut, cache=tmp_path / "b")
    assert prefix.manifest.sha256 == whole.manifest.sha256
    assert torch.equal(prefix._ids, whole._ids)
    assert "first 2,500 lines, 2,500 rows" in prefix.description
    assert sum(prefix.size(part) for part in ("train", "validation", "test")) == 2500


def test_a_cache_is_created_once_and_can_be_used_without_its_source(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "train.txt"
    path.write_bytes(source.read_bytes())
    first = Criteo(path)
    monkeypatch.setattr(stages, "parse", None)
    assert torch.equal(Criteo(path)._ids, first._ids)
    path.unlink()
    assert torch.equal(Criteo(path)._ids, first._ids)
    with pytest.raises(FileNotFoundError, match=r"train\.txt does not exist"):
        Criteo(path, 3000)


def test_a_source_that_changed_is_read_again(source: Path, tmp_path: Path) -> None:
    path = tmp_path / "train.txt"
    lines = source.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines))
    Criteo(path)
    path.write_bytes(b"".join(lines[1000:]))
    assert Criteo(path).manifest.rows == ROWS - 1000


# Parts, order, noise -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "rate", "first"), [(1000, 0.256, 0), (1003, 0.256, 1), (20011, 0.5, 1), (57, 0.3, 0)])
def test_the_split_is_scikit_learns(rows: int, rate: float, first: int) -> None:
    selection = pytest.importorskip("sklearn.model_selection")
    labels = (np.random.default_rng(rows).random(rows) < rate).astype(np.uint8)
    labels[0] = first
    splitter = selection.StratifiedKFold(n_splits=10, shuffle=True, random_state=2018)
    expected = [test for _, test in splitter.split(labels, labels)]
    fold_of = folds(labels)
    np.testing.assert_array_equal(rows_of("test", fold_of), expected[0])
    np.testing.assert_array_equal(rows_of("validation", fold_of), expected[1])
    np.testing.assert_array_equal(rows_of("train", fold_of), np.concatenate(expected[2:]))


def test_batches_contain_the_rows_of_their_part(source: Path, tmp_path: Path) -> None:
    criteo = Criteo(source, cache=tmp_path)
    table = next(criteo.stream(ROWS, device=CPU))
    for part in ("validation", "test"):
        rows = criteo.rows(part).long()
        ids, labels = everything(criteo, part, seed=5, noise=0.5)
        assert torch.equal(ids, table.ids[rows])
        assert torch.equal(labels, table.labels[rows])
    ids, labels = everything(criteo, "train", seed=5)
    assert len(ids) == criteo.size("train")
    rows = criteo.rows("train").long()
    as_rows = [
        sorted(map(tuple, torch.column_stack(pair).tolist()))
        for pair in ((ids, labels), (table.ids[rows], table.labels[rows]))
    ]
    assert as_rows[0] == as_rows[1]
    assert not torch.equal(ids, everything(criteo, "train", seed=6)[0])
    assert torch.equal(ids, everything(criteo, "train", seed=5)[0])


def test_noise_flips_an_exact_share_of_training_negatives(source: Path, tmp_path: Path) -> None:
    criteo = Criteo(source, cache=tmp_path)
    _, clean = everything(criteo, "train", seed=1)
    _, noisy = everything(criteo, "train", seed=1, noise=0.01)
    assert (noisy >= clean).all()
    assert int((noisy - clean).sum()) == round(0.01 * int((clean == 0).sum())) > 10
    stream = [torch.cat([b.labels for b in criteo.stream(999, device=CPU, noise=noise)]) for noise in (0.0, 0.02)]
    assert int((stream[1] - stream[0]).sum()) == round(0.02 * int((stream[0] == 0).sum()))


# Invalid lines -----------------------------------------------------------------------------------------------------


def replaced(place: int, by: bytes) -> bytes:
    columns = GOOD.split(b"\t")
    columns[place] = by
    return b"\t".join(columns)


BAD = {
    "39 columns instead of 40": GOOD.rpartition(b"\t")[0],
    "41 columns instead of 40": GOOD + b"\t00000000",
    "1 columns instead of 40": b"1",
    "the line is empty": b"",
    "the label is '2'": replaced(0, b"2"),
    "the label is ''": replaced(0, b""),
    "the label is '01'": replaced(0, b"01"),
    "I3 is 'abc', not an integer": replaced(3, b"abc"),
    "I4 is '1.5', not an integer": replaced(4, b"1.5"),
    "I5 is '0x1F', not an integer": replaced(5, b"0x1F"),
    "I6 is ' 7', not an integer": replaced(6, b" 7"),
    "I7 is '+7', not an integer": replaced(7, b"+7"),
    "I8 is '-', not an integer": replaced(8, b"-"),
    "I1 is '9999999999', beyond 32 bits": replaced(1, b"9999999999"),
    "I1 is '2147483648', beyond 32 bits": replaced(1, b"2147483648"),
    "I2 is '-2147483649', beyond 32 bits": replaced(2, b"-2147483649"),
    "I2 is '123456789012345', beyond 32 bits": replaced(2, b"123456789012345"),
    "C1 is '0a1b2c3g', not 8 hex": replaced(14, b"0a1b2c3g"),
    "C2 is '0A1B2C3D', not 8 hex": replaced(15, b"0A1B2C3D"),
    "C3 is '0a1b', not 8 hex": replaced(16, b"0a1b"),
    "C4 is '0a1b2c3d4', not 8 hex": replaced(17, b"0a1b2c3d4"),
    "C26 is '-a1b2c3d', not 8 hex": replaced(39, b"-a1b2c3d"),
    r"C5 is '\xff\xfe\x00a1b2c', not 8 hex": replaced(18, b"\xff\xfe\x00a1b2c"),
}


@pytest.mark.usefixtures("reader")
@pytest.mark.parametrize("reason", BAD)
def test_an_invalid_line_is_skipped_and_reported_with_its_number(reason: str) -> None:
    text = b"\n".join([GOOD, BAD[reason], GOOD, replaced(5, b"-2147483647"), replaced(9, b"")]) + b"\n"
    table, bad = parse(text, first_line=11)
    assert len(table) == 4
    assert table.column("I5").to_pylist() == [3, 3, -2147483647, 3]
    assert table.column("I9").to_pylist() == [3, 3, 3, None]
    assert [(line.number, line.reason.startswith(reason)) for line in bad] == [(12, True)], bad
    assert [line.number for line in parse(BAD[reason] + b"\n", 1)[1]] == [1], "also where no other line is bad"


@pytest.mark.usefixtures("reader")
@pytest.mark.parametrize("integer", [b"-2147483648", b"2147483647", b"-0", b"007", b"-000000000012", b"0" * 5000])
def test_an_integer_is_valid_independently_of_its_neighbors(integer: bytes) -> None:
    for beside, others in ((b"", []), (b"bad\n", [2])):
        table, bad = parse(replaced(3, integer) + b"\n" + beside, 1)
        assert table.column("I3").to_pylist() == [int(integer[-20:])]
        assert [line.number for line in bad] == others


@pytest.mark.usefixtures("reader")
@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
def test_a_complete_last_line_without_a_newline_is_accepted(end: bytes) -> None:
    newline = end or b"\n"
    table, bad = parse(GOOD + newline + GOOD + end, 1, ends_early=not end)
    assert (len(table), bad) == (2, [])


@pytest.mark.usefixtures("reader")
@pytest.mark.parametrize("kept", [1, 2, 30, len(GOOD) - 9, len(GOOD) - 8, len(GOOD) - 1])
def test_a_truncated_last_line_is_reported(kept: int) -> None:
    table, bad = parse(GOOD + b"\n" + GOOD[:kept], 1, ends_early=True)
    assert len(table) == 1
    assert bad[0].number == 2
    assert "the file ends within this line" in bad[0].reason


def damaged(source: Path, path: Path) -> tuple[Path, list[int]]:
    """Write a copy of the source with invalid lines, and return its path and the numbers of these lines."""
    lines = source.read_bytes().splitlines()
    numbers = [1, 700, 701, 3333, 5000, 5999, 6000]
    for number, bad in zip(numbers, BAD.values(), strict=False):
        lines[number - 1] = bad
    lines[-1] = lines[0]
    path.write_bytes(b"\n".join(lines))
    return path, numbers


def test_invalid_lines_are_counted_and_listed_or_raise_an_error_in_strict_mode(source: Path, tmp_path: Path) -> None:
    path, numbers = damaged(source, tmp_path / "train.txt")
    manifest = preprocess(path, tmp_path / "cache")
    assert (manifest.rows, manifest.bad) == (ROWS - len(numbers), len(numbers))
    assert [line.number for line in manifest.first_bad] == numbers[:5]
    listed = (tmp_path / "cache" / "bad-lines.tsv").read_text().splitlines()
    assert [int(line.split("\t")[0]) for line in listed] == numbers
    for folder in ("cache", "fresh"):
        with pytest.raises(BadLinesError, match=r"line 1: 39 columns instead of 40"):
            preprocess(path, tmp_path / folder, strict=True)
    good = tmp_path / "good.txt"
    kept = [line for number, line in enumerate(path.read_bytes().split(b"\n"), 1) if number not in numbers]
    good.write_bytes(b"\n".join(kept) + b"\n")
    preprocess(good, tmp_path / "good")
    assert (tmp_path / "good" / "ids.i32").read_bytes() == (tmp_path / "cache" / "ids.i32").read_bytes()


def test_a_truncated_gzip_file_is_read_up_to_its_end_and_noted(source: Path, tmp_path: Path) -> None:
    path = tmp_path / "train.txt.gz"
    packed = gzip.compress(source.read_bytes())
    path.write_bytes(packed[: len(packed) // 2])
    manifest = preprocess(path, tmp_path / "cache")
    assert 1000 < manifest.rows < ROWS - 1000
    assert "gzip stream is truncated" in manifest.notes[0]
    with pytest.raises(BadLinesError, match="gzip stream is truncated"):
        preprocess(path, tmp_path / "strict", strict=True)


@pytest.mark.parametrize("damage", [lambda packed: packed[:500] + b"???" + packed[503:], lambda p: p + b"more"])
def test_a_damaged_gzip_is_named(source: Path, tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "train.txt.gz"
    path.write_bytes(damage(gzip.compress(source.read_bytes())))
    with pytest.raises(ValueError, match=r"train\.txt\.gz: the gzip stream is damaged: "):
        preprocess(path, tmp_path / "cache")


def test_a_file_without_newlines_is_not_read_into_memory(tmp_path: Path) -> None:
    path = tmp_path / "train.txt"
    path.write_bytes(b"x" * (stages.CHUNK + stages.MAX_LINE + 1))
    with pytest.raises(ValueError, match=r"train\.txt has a line of more than 1,048,576 bytes"):
        preprocess(path, tmp_path / "cache")


def test_a_file_of_one_class_cannot_be_split(tmp_path: Path) -> None:
    path = tmp_path / "train.txt"
    path.write_bytes((GOOD + b"\n") * 50)
    with pytest.raises(ValueError, match="50 clicks in 50 rows"):
        preprocess(path, tmp_path / "cache")


def test_a_file_without_valid_lines_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "train.txt"
    path.write_bytes(b"label,I1\n" * 20)
    with pytest.raises(ValueError, match=r"0 valid rows .*\n.*lines so far: 20\n    line 1: 1 columns"):
        preprocess(path, tmp_path / "cache")
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="is empty"):
        preprocess(path, tmp_path / "cache")


# Resuming after an interruption ------------------------------------------------------------------------------


class StopError(Exception):
    pass


@pytest.mark.parametrize("stop", [("read", 0.3), ("read", 1), ("count", 0.5), ("encode", 0.4), ("encode", 1)])
def test_an_interrupted_run_resumes_and_gives_the_same_files(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: tuple[str, float]
) -> None:
    def stop_at(stage: str, share: float, rows: int) -> None:
        if stage == stop[0] and share >= stop[1]:
            raise StopError

    with pytest.raises(StopError):
        preprocess(source, tmp_path / "stopped", workers=1, report=stop_at)
    begun = Manifest.load(tmp_path / "stopped")
    assert begun is not None
    assert begun.complete == (stop == ("encode", 1))
    parsed: list[int] = []

    def seen(text: bytes, line: int, cut: bool) -> Any:
        parsed.append(line)
        return parse(text, line, cut)

    monkeypatch.setattr(stages, "parse", seen)
    resumed = preprocess(source, tmp_path / "stopped")
    assert not {chunk.first_line for chunk in begun.chunks} & set(parsed), "what was read is not parsed again"
    preprocess(source, tmp_path / "whole")
    assert resumed.complete
    assert files_of(tmp_path / "stopped") == files_of(tmp_path / "whole")


class Steps:
    """Raises StopError before or after one of the calls that create, rename or delete files, counted from 0."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: float) -> None:
        self.left = at
        for where, name in ((Path, "replace"), (Path, "unlink"), (shutil, "rmtree"), (os, "pwrite")):
            monkeypatch.setattr(where, name, self.counted(getattr(where, name)))

    def counted(self, do: Callable[..., object]) -> Callable[..., object]:
        def step(*args: object, **options: object) -> object:
            self.left -= 1
            if self.left == -1:
                raise StopError
            done = do(*args, **options)
            self.left -= 1
            if self.left == -1:
                raise StopError
            return done

        return step


def stopped_at(source: Path, folder: Path, at: int) -> bool:
    """Interrupt the preprocessing at a step, and return whether there are that many steps."""
    with pytest.MonkeyPatch.context() as patch:
        steps = Steps(patch, at)
        try:
            preprocess(source, folder, workers=1)
        except StopError:
            return True
        return steps.left < 0


def check_stops(short: Path, folder: Path, every: int, first: int = 0) -> int:
    """Interrupt the preprocessing at every n-th step, and check that the next call always gives the same files."""
    preprocess(short, folder / "whole", workers=1)
    expected, at = files_of(folder / "whole"), first
    while stopped_at(short, folder / "stopped", at):
        preprocess(short, folder / "stopped", workers=1)
        files = {name: content for name, content in files_of(folder / "stopped").items() if "bad/" not in name}
        assert files == expected, at
        shutil.rmtree(folder / "stopped")
        at += every
    return at


def test_preprocessing_resumes_after_ending_at_a_random_step(
    short: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "CHUNK", 50_000)
    assert check_stops(short, tmp_path, every=17) > 100


@pytest.mark.slow
def test_preprocessing_resumes_after_ending_at_every_step(
    short: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "CHUNK", 50_000)
    assert check_stops(short, tmp_path, every=1) > 100


def test_preprocessing_resumes_after_ending_while_invalid_lines_are_collected(
    short: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list of invalid lines is assembled from parts, which must exist until the manifest records the list."""
    remove = shutil.rmtree

    def remove_and_stop(folder: Path, **options: Any) -> None:
        remove(folder, **options)
        if not options:
            raise StopError

    monkeypatch.setattr(shutil, "rmtree", remove_and_stop)
    with pytest.raises(StopError):
        preprocess(short, tmp_path / "cache", workers=1)
    assert preprocess(short, tmp_path / "cache").bad == 1
    assert (tmp_path / "cache" / "bad-lines.tsv").read_text().startswith("401\t1 columns")


@pytest.mark.slow
def test_preprocessing_resumes_after_being_killed(source: Path, tmp_path: Path) -> None:
    """The process is killed with SIGKILL twice before the last call completes."""
    program = (
        "import sys; from pathlib import Path; from cadam_paper.ctr import preprocess as p; p.CHUNK = 200_000\n"
        "show = lambda *progress: print(*progress, flush=True)\n"
        f"p.preprocess(Path({str(source)!r}), Path({str(tmp_path / 'killed')!r}), workers=1, report=show)"
    )
    for lines in (5, 1000):
        process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
        assert process.stdout is not None
        for _ in range(lines):
            if not process.stdout.readline():
                break
        process.send_signal(signal.SIGKILL)
        process.wait()
    preprocess(source, tmp_path / "whole")
    assert Manifest.load(tmp_path / "killed") == Manifest.load(tmp_path / "whole")
    assert files_of(tmp_path / "killed") == files_of(tmp_path / "whole")


def test_resuming_with_a_changed_source_is_an_error(source: Path, tmp_path: Path) -> None:
    path = tmp_path / "train.txt"
    path.write_bytes(source.read_bytes())

    def stop_at(stage: str, share: float, rows: int) -> None:
        if rows > 1500:
            raise StopError

    with pytest.raises(StopError):
        preprocess(path, tmp_path / "cache", workers=1, report=stop_at)
    content = bytearray(path.read_bytes())
    content[5000] ^= 1
    replace_content(path, content)
    with pytest.raises(stages.SourceChangedError, match="changed after line"):
        preprocess(path, tmp_path / "cache")


def replace_content(path: Path, content: bytes | bytearray) -> None:
    """Replace the content of a file by another one of the same length, and keep the modification time."""
    status = path.stat()
    assert len(content) == status.st_size
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("at", [0, -1])
def test_another_file_of_the_same_size_and_time_is_read_again(short: Path, tmp_path: Path, at: int) -> None:
    path = tmp_path / "train.txt"
    path.write_bytes(short.read_bytes())
    before = preprocess(path, tmp_path / "cache")
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    replace_content(path, content)
    assert preprocess(path, tmp_path / "cache").sha256 != before.sha256


def test_another_version_discards_an_unfinished_folder_and_reads_a_complete_one(
    short: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder must not contain files that different versions of the code created."""
    assert stopped_at(short, tmp_path / "begun", 30)
    made_by = preprocess(short, tmp_path / "complete").made_by
    monkeypatch.setattr(stages, "made_by", lambda: "later")
    assert preprocess(short, tmp_path / "begun").made_by == "later"
    assert preprocess(short, tmp_path / "complete").made_by == made_by != "later"


def test_two_processes_cannot_write_to_one_folder(source: Path, tmp_path: Path) -> None:
    with stages._lock(tmp_path), pytest.raises(RuntimeError, match="another process"):
        preprocess(source, tmp_path)


def test_a_complete_cache_is_read_without_a_lock_and_without_write_permission(
    short: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Criteo(short, cache=tmp_path)
    files = [first.folder, *first.folder.rglob("*")]
    times = [path.stat().st_mtime_ns for path in files]
    with stages._lock(first.folder):
        monkeypatch.setattr(stages, "_lock", None)
        monkeypatch.setattr(Path, "mkdir", None)
        assert torch.equal(Criteo(short, cache=tmp_path)._ids, first._ids)
    assert [path.stat().st_mtime_ns for path in files if path.name != "lock"] == [
        time for path, time in zip(files, times, strict=True) if path.name != "lock"
    ]


def test_a_cache_that_is_rewritten_while_it_is_opened_is_refused(
    short: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Criteo(short, cache=tmp_path)

    def others(source: Path, folder: Path, **options: object) -> Manifest:
        (folder / "manifest.json").unlink()
        return first.manifest

    monkeypatch.setattr(reading, "preprocess", others)
    with pytest.raises(RuntimeError, match="another process is writing"):
        Criteo(short, cache=tmp_path)


@pytest.mark.parametrize("name", ["ids.i32", "labels.u8"])
@pytest.mark.parametrize("stop", [("encode", 0.4), ("encode", 1)])
def test_missing_ids_are_encoded_again(source: Path, tmp_path: Path, name: str, stop: tuple[str, float]) -> None:
    """A missing file must not be replaced by zeros."""
    whole = preprocess(source, tmp_path / "whole")

    def stop_at(stage: str, share: float, rows: int) -> None:
        if stage == stop[0] and share >= stop[1]:
            raise StopError

    with pytest.raises(StopError):
        preprocess(source, tmp_path / "stopped", workers=1, report=stop_at)
    (tmp_path / "stopped" / name).unlink()
    assert preprocess(source, tmp_path / "stopped") == whole
    assert files_of(tmp_path / "stopped") == files_of(tmp_path / "whole")


def test_a_damaged_manifest_is_named(short: Path, tmp_path: Path) -> None:
    preprocess(short, tmp_path)
    (tmp_path / "manifest.json").write_text('{"format": 2, "chunks": [')
    with pytest.raises(ValueError, match=r"manifest\.json is damaged .*delete "):
        preprocess(short, tmp_path)


# Numbers -------------------------------------------------------------------------------------------------------


def test_buckets_of_integers() -> None:
    values = np.array([-3, 0, 1, 2, 3, 4, 5, 7, 8, 100, 65_535, 65_536, 10**6, 2**31 - 1], np.int32)
    assert bucketed(values).tolist() == [-3, 0, 1, 2, 1, 1, 2, 3, 4, 21, 122, 122, 190, 461]
    assert bucketed(values).tolist() == [bucket(int(value)) for value in values]
    assert all(bucket(unbucket(category)) == category for category in range(461))


def test_a_vocabulary_too_large_for_the_format_is_refused(tmp_path: Path) -> None:
    def clicks(size: int) -> Generated:
        return Generated(50, (size, *scale_vocabulary(0.002)[1:]))

    write(clicks(341), tmp_path / "train.txt")
    assert preprocess(tmp_path / "train.txt", tmp_path / "cache", min_count=1).bad == 0
    with pytest.raises(ValueError, match="at most 341 ids"):
        write(clicks(342), tmp_path / "train.txt")


def test_hexadecimal_digits() -> None:
    random = np.random.default_rng(0)
    values = np.concatenate([random.integers(2**32, size=1000, dtype=np.uint32), np.array([0, 2**32 - 1], np.uint32)])
    texts = np.frombuffer(b"".join(b"%08x" % int(value) for value in values), np.uint64)
    numbers, good = hexadecimal(texts)
    assert good
    np.testing.assert_array_equal(numbers, values)
    for character in range(256):
        for place in (0, 3, 7):
            text = bytearray(b"0123abcd")
            text[place] = character
            valid = bytes([character]) in b"0123456789abcdef"
            assert hexadecimal(np.frombuffer(bytes(text), np.uint64))[1] == valid, text


def test_a_vocabulary_is_ordered_by_count_then_token() -> None:
    tokens = np.array([7, 7, 7, 2, 2, 9, 9, 9, 1], np.uint32)
    frequent, counts = vocabulary(tokens, 2)
    assert frequent.tolist() == [7, 9, 2]
    assert counts.tolist() == [3, 3, 2]


@pytest.mark.parametrize("size", [0, 1, 5, 3000, 300_000])
def test_an_encoder_finds_every_token_and_no_other(size: int) -> None:
    random = np.random.default_rng(size)
    tokens = np.unique(random.integers(2**32, size=size, dtype=np.uint32))
    random.shuffle(tokens)
    if size == 5:
        tokens = np.array([0, 1, 2**32 - 1, 5, 3], np.uint32)
    encoder = Encoder(tokens, 100)
    np.testing.assert_array_equal(encoder(tokens, None), 101 + np.arange(len(tokens)))
    others = np.setdiff1d(np.concatenate([np.arange(50), random.integers(2**32, size=1000)]).astype(np.uint32), tokens)
    assert (encoder(others, None) == 100).all()
    missing = np.arange(len(tokens)) % 2 == 0
    np.testing.assert_array_equal(encoder(tokens, missing), np.where(missing, 100, 101 + np.arange(len(tokens))))


# The command ---------------------------------------------------------------------------------------------------


def test_the_command_preprocesses_and_prints_a_summary(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, numbers = damaged(source, tmp_path / "train.txt")
    assert main.main(["criteo", str(tmp_path), "--cache", str(tmp_path / "cache")]) == 0
    said = capsys.readouterr()
    assert f"{ROWS - len(numbers):,} rows" in said.out
    assert "skipped 7 invalid lines" in said.out
    assert "line 700: 41 columns instead of 40" in said.out
    assert "3 of 3: encode 100%" in said.err
    assert said.err.count("read 100%") == 1
    assert main.main(["criteo", str(path), "--strict", "--rows", "500"]) == 1
    assert "line 1: 39 columns" in capsys.readouterr().err
    assert main.main(["criteo", str(tmp_path / "nowhere.txt")]) == 3
    assert "nowhere.txt" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["train.txt", "train.txt.gz"])
def test_the_command_generates_a_file_and_does_not_overwrite_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    path = tmp_path / name
    assert main.main(["criteo", str(path), "--generate", "2000"]) == 0
    assert f"{name}: 2,000 generated rows" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [path]
    content = path.read_bytes()
    assert content.startswith(b"\x1f\x8b") == (path.suffix == ".gz")
    assert (Criteo(path).manifest.rows, Criteo(path).manifest.bad) == (2000, 0)
    assert main.main(["criteo", str(path), "--generate", "3000"]) == 1
    assert "exists already" in capsys.readouterr().err
    assert path.read_bytes() == content
    assert main.main(["criteo", str(tmp_path / "few.txt"), "--generate", "9"]) == 1
    assert "rows must be at least 10" in capsys.readouterr().err
    assert main.main(["criteo", str(tmp_path / "no" / "few.txt"), "--generate", "20"]) == 3
    assert not (tmp_path / "few.txt").exists()
    assert main.main(["criteo", str(tmp_path / "few.txt"), "--generate", "20", "--rows", "20"]) == 2
    assert "--generate cannot be combined with --rows" in capsys.readouterr().err


def test_interrupted_generation_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(text, "_lines", stopped)
    assert main.main(["criteo", str(tmp_path / "train.txt"), "--generate", "2000"]) == 130
    assert not list(tmp_path.iterdir())


def test_without_pyarrow_the_error_names_the_package(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(parsing, "find_spec", lambda name: None)
    assert main.main(["criteo", str(source), "--cache", str(tmp_path)]) == 5
    assert "pip install pyarrow" in capsys.readouterr().err


@pytest.mark.usefixtures("reader")
def test_find_error_agrees_with_the_parsers() -> None:
    """Lines with one random change are valid for both or invalid for both."""
    random = np.random.default_rng(0)
    outcomes: Counter[bool] = Counter()
    for _ in range(150):
        line = bytearray(GOOD)
        line[random.integers(len(line))] = random.choice(np.frombuffer(b"0159afgAF-+. xX\t\"'\\\x00,;\xff", np.uint8))
        table, bad = parse(bytes(line) + b"\n", 1)
        wrong = find_error(bytes(line))
        assert len(bad) == (wrong is not None)
        assert len(table) == 1 - len(bad)
        outcomes[wrong is None] += 1
    assert min(outcomes.values()) > 20


@pytest.mark.usefixtures("needs_c")
def test_the_c_parser_and_pyarrow_give_the_same_files(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parsing, "BLOCK", 50_000)
    path, _ = damaged(source, tmp_path / "train.txt")
    compiled = preprocess(path, tmp_path / "C")
    monkeypatch.setattr(parsing, "compiled", lambda: "not wanted")
    assert preprocess(path, tmp_path / "pyarrow") == compiled
    assert files_of(tmp_path / "pyarrow") == files_of(tmp_path / "C")


@pytest.mark.usefixtures("needs_c")
def test_the_c_parser_and_pyarrow_accept_the_same_texts(source: Path) -> None:
    """Both accept a text with random insertions, deletions and changes exactly if each of its lines is valid."""
    random = np.random.default_rng(1)
    lines = source.read_bytes().splitlines(keepends=True)
    c = parsing.compiled()
    assert not isinstance(c, str)
    characters = np.frombuffer(b"0019af-\t\t\n\rgA+ \x00\xff", np.uint8)
    outcomes: Counter[bool] = Counter()
    for _ in range(700):
        start = random.integers(len(lines) - 20)
        text = bytearray(b"".join(lines[start : start + random.integers(1, 20)]))
        for _ in range(random.integers(3)):
            start, removed, added = random.integers(len(text) - 1), random.integers(2), random.integers(2)
            text[start : start + removed] = random.choice(characters, added).tobytes()
        good = not any(map(find_error, bytes(text).split(b"\n")[:-1]))
        by_c, by_pyarrow = parsing._parse_with_c(c, bytes(text)), parsing._parse_with_pyarrow(bytes(text))
        assert (by_c is not None) == (by_pyarrow is not None) == good, text
        if by_c is not None:
            by_c.validate(full=True)
            assert by_c.equals(by_pyarrow)
        outcomes[good] += 1
    assert min(outcomes.values()) > 150, outcomes


@pytest.mark.usefixtures("needs_c")
def test_the_c_parser_rejects_a_text_without_a_final_newline() -> None:
    c = parsing.compiled()
    assert not isinstance(c, str)
    empty, whole = parsing._parse_with_c(c, b""), parsing._parse_with_c(c, GOOD + b"\n")
    assert empty is not None
    assert len(empty) == 0
    assert parsing._parse_with_c(c, GOOD) is None
    assert parsing._parse_with_c(c, GOOD + b"\n" + GOOD) is None
    assert whole is not None
    assert len(whole) == 1


@pytest.mark.parametrize("mode", ["clean", "overread"])
def test_the_c_parser_does_not_read_beyond_the_text(tmp_path: Path, mode: str) -> None:
    sanitizer.runtime()
    library = build.link(tmp_path / "criteo.so", [(parsing.SOURCE, ())], sanitizer.FLAGS)
    sanitizer.check(Path(__file__).with_name("asan_criteo_parser.py"), library, mode)


def test_the_c_parser_is_compiled_into_the_users_cache_or_the_reason_is_returned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", "/nowhere/cc")
    assert "/nowhere/cc" in str(parsing.compiled.__wrapped__())
    monkeypatch.delenv("CC")
    if not isinstance(parsing.compiled.__wrapped__(), str):
        assert len(list((tmp_path / "cadam").glob("criteo-*.so"))) == 1


def test_the_command_prints_why_there_is_no_c_parser(
    short: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(parsing, "compiled", lambda: "there is no compiler")
    assert main.main(["criteo", str(short), "--cache", str(tmp_path)]) == 0
    assert "there is no compiler" in capsys.readouterr().err
