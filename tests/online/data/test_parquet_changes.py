"""Parquet files that are replaced, extended, repaired, renamed, touched or deleted before a run continues."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cadam.cli.exit_codes import DONE, USAGE
from cadam.online import ParquetSource
from tests.cli.test_run import HERE, run
from tests.online.data.test_sources import write_parquet
from tests.online.streams import SCHEMA, table


def finished(folder: Path) -> ParquetSource:
    """A source that has read the files a and b."""
    for name in ("a", "b"):
        write_parquet(folder / f"{name}.parquet", table(40, seed=ord(name)))
    source = ParquetSource(folder, SCHEMA, batch_size=16)
    assert read(source) == 80
    return source


def read(source: ParquetSource) -> int:
    return sum(len(batch.events) for batch in source if batch is not None and batch.events is not None)


def write_damaged(path: Path) -> None:
    """Write a file of 4,000 rows that cannot be read from row 2,000 on."""
    pq.write_table(pa.table({key: list(value) for key, value in table(4000).items()}), path, row_group_size=1000)
    page = pq.read_metadata(path).row_group(2).column(0).data_page_offset
    content = bytearray(path.read_bytes())
    content[page - 50 : page + 400] = bytes(450)
    path.write_bytes(content)


def resumed(source: ParquetSource) -> ParquetSource:
    other = ParquetSource(source.path, SCHEMA, batch_size=source.batch_size)
    other.load_state_dict(json.loads(json.dumps(source.state_dict())))
    return other


def test_a_position_of_another_batch_size_is_refused(tmp_path: Path) -> None:
    source = finished(tmp_path)
    with pytest.raises(ValueError, match="counts batches of 16 events, but now 4,096 are read at once"):
        ParquetSource(tmp_path, SCHEMA, batch_size=4096).load_state_dict(source.state_dict())


@pytest.mark.parametrize("rows", [40, 60], ids=["replaced", "extended"])
def test_a_finished_file_that_is_another_one_now_is_refused(rows: int, tmp_path: Path) -> None:
    source = finished(tmp_path)
    write_parquet(tmp_path / "a.parquet", table(rows, seed=5))
    with pytest.raises(ValueError, match=r"a\.parquet was replaced or extended"):
        resumed(source)


def test_the_command_refuses_a_file_that_was_extended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    options = ("--data", f"parquet:{tmp_path / 'a.parquet'}", "--checkpoint", tmp_path / "state", "--quiet")
    write_parquet(tmp_path / "a.parquet", table(100))
    assert run(*options) == DONE
    write_parquet(tmp_path / "a.parquet", table(150))
    assert run(*options) == USAGE
    assert "a.parquet was replaced or extended" in capsys.readouterr().err


def test_a_change_while_a_folder_is_followed_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = finished(tmp_path)
    write_parquet(tmp_path / "a.parquet", table(60, seed=5))
    for _ in range(2):
        assert read(source) == 0
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "a.parquet was replaced" in caplog.text


def test_a_renamed_file_is_not_learned_twice(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = finished(tmp_path)
    (tmp_path / "a.parquet").rename(tmp_path / "z.parquet")
    other = resumed(source)
    assert read(other) == 0
    assert "z.parquet" in caplog.text
    assert list(other.state_dict()["done"]) == ["b.parquet", "z.parquet"]


def test_new_files_are_read_also_with_the_content_of_a_deleted_one(tmp_path: Path) -> None:
    source = finished(tmp_path)
    (tmp_path / "a.parquet").unlink()
    write_parquet(tmp_path / "c.parquet", table(40, seed=ord("a")))
    os.utime(tmp_path / "c.parquet", (1, 1))
    os.utime(tmp_path / "b.parquet", (2, 2))  # touched, not changed
    assert read(resumed(source)) == 40


def test_a_position_of_an_older_version_is_accepted(tmp_path: Path) -> None:
    state = finished(tmp_path).state_dict()
    other = ParquetSource(tmp_path, SCHEMA, batch_size=16)
    other.load_state_dict({**state, "done": list(state["done"])})
    assert read(other) == 0


def test_a_file_that_is_replaced_while_it_is_read_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_parquet(tmp_path / "a.parquet", table(40, seed=1))
    write_parquet(tmp_path / "_new.parquet", table(60, seed=2))
    source = ParquetSource(tmp_path, SCHEMA, batch_size=16)
    batches = iter(source)
    next(batches)
    (tmp_path / "_new.parquet").replace(tmp_path / "a.parquet")
    assert len(list(batches)) == 2
    assert "a.parquet was replaced" in caplog.text
    with pytest.raises(ValueError, match=r"a\.parquet was replaced or extended"):
        resumed(source)


def damage(path: Path) -> None:
    """Cut the end of a file off, where its metadata is."""
    path.write_bytes(path.read_bytes()[:-100])


def test_a_rejected_file_is_read_once_it_is_repaired(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a", "b"):
        write_parquet(tmp_path / f"{name}.parquet", table(40, seed=ord(name)))
    damage(tmp_path / "b.parquet")
    source = ParquetSource(tmp_path, SCHEMA, batch_size=16)
    assert read(source) == 40
    assert read(resumed(source)) == 0
    write_parquet(tmp_path / "b.parquet", table(40, seed=ord("b")))
    caplog.clear()
    other = resumed(source)
    assert read(other) == 40
    assert "b.parquet could not be read before" in caplog.text
    assert read(resumed(other)) == 0


def test_a_file_that_was_deleted_before_it_was_read_is_read_when_it_is_back(tmp_path: Path) -> None:
    source = ParquetSource(tmp_path, SCHEMA, batch_size=16)
    write_parquet(tmp_path / "a.parquet", table(40))
    source._find_new_files()
    (tmp_path / "a.parquet").unlink()
    assert read(source) == 0
    write_parquet(tmp_path / "a.parquet", table(40))
    assert read(resumed(source)) == 40


def test_a_file_that_was_read_in_part_and_is_repaired_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cadam.online.data.sources.parquet.CHUNK_BATCHES", 1)
    path = tmp_path / "a.parquet"
    write_damaged(path)
    source = ParquetSource(tmp_path, SCHEMA, batch_size=1000)
    assert 0 < read(source) < 4000
    write_parquet(path, table(4000, seed=2))
    with pytest.raises(ValueError, match=r"a\.parquet was replaced or extended"):
        resumed(source)


def test_rows_before_damage_are_used_and_the_next_file_is_read_in_large_chunks(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_damaged(path)
    write_parquet(tmp_path / "b.parquet", table(40))
    source = ParquetSource(tmp_path, SCHEMA, batch_size=100)
    chunk = source.state_dict()["chunk_batches"]
    assert chunk > 20, "the damage must be in the first chunk"
    batches = [batch for batch in source if batch is not None]
    assert sum(len(batch.events) for batch in batches if batch.events is not None) == 2000 + 40
    (rejected,) = (record for batch in batches for record in batch.rejected)
    assert rejected.where == f"{path}, row 2000 and all after it"
    assert source.state_dict()["chunk_batches"] == chunk


def test_a_file_that_is_replaced_while_it_is_read_is_rejected_from_the_next_batch_on(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", table(40))
    source = ParquetSource(tmp_path, SCHEMA, batch_size=4)
    batches = iter(source)
    for _ in range(3):
        next(batches)
    batches.close()  # type: ignore[attr-defined]
    write_parquet(tmp_path / "a.parquet", table(40, seed=2))
    (batch,) = (batch for batch in source if batch is not None)
    (rejected,) = batch.rejected
    assert rejected.where == f"{tmp_path / 'a.parquet'}, row 12 and all after it"
