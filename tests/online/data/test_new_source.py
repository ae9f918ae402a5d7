"""Adding a source: a new source is one class and one entry."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from cadam import sources_and_metrics
from cadam.cli import main
from cadam.online import Events, Schema, Source, open_source
from cadam.online.data.events import Batch
from cadam.online.data.sources import resolve_uri
from cadam.online.data.sources.base import ColumnNames
from cadam.online.data.sources.sample import Sample, SamplingError, sample_records
from cadam.online.data.validation import MismatchError, check_columns
from cadam.sources_and_metrics import SourceEntry


class ArraySource(Source):
    """The objects of one JSON array in a file: a source that exists only in this test."""

    def __init__(self, path: str, schema: Schema, batch_size: int) -> None:
        self.records = json.loads(Path(path).read_text())
        self.location, self.schema, self.batch_size, self.position = path, schema, batch_size, 0

    @classmethod
    def from_uri(cls, uri: str, schema: Schema, **options: Any) -> Source:
        return cls(uri.partition(":")[2], schema, options["batch_size"])

    def __iter__(self) -> Iterator[Batch]:
        while self.position < len(self.records):
            start, self.position = self.position, self.position + self.batch_size
            records = self.records[start : self.position]
            yield self.schema.convert_records(records, [f"record {start + row}" for row in range(len(records))])

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.position = state["position"]

    def columns(self) -> ColumnNames:
        return ColumnNames([name for record in self.records for name in record], are_complete=False)

    def sample(self) -> Sample:
        return sample_records(self.records, len(self.records), "JSON array", is_text=False)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    entry = SourceEntry(
        f"{__name__}:ArraySource",
        forms={"array:PATH": "the objects of a JSON array"},
        schemes=("array",),
        suffixes={".array": "array"},
    )
    monkeypatch.setattr(sources_and_metrics, "SOURCES", [*sources_and_metrics.SOURCES, entry])
    records = [{"item": row % 5, "price": row / 7, "click": int(row % 5 == 0)} for row in range(3000)]
    path = tmp_path / "clicks.array"
    path.write_text(json.dumps(records))
    return path


def test_a_registered_source_is_opened_by_its_scheme_or_suffix(path: Path) -> None:
    assert resolve_uri(str(path)) == f"array:{path}"
    source = open_source(f"array:{path}", Schema({"item": "hash:9"}, label="click"), batch_size=1000)
    assert [len(batch.events) for batch in source] == [1000, 1000, 1000]  # type: ignore[union-attr, arg-type]
    with pytest.raises(ValueError, match="array:PATH"):
        open_source("ftp://host/file", Schema({"item": "hash:9"}))


def test_the_columns_of_a_registered_source_are_validated(path: Path) -> None:
    schema = Schema({"prize": "number"}, label="click")
    with pytest.raises(MismatchError, match=r"clicks\.array has no column 'prize'"):
        check_columns(open_source(f"array:{path}", schema), schema)


def test_the_command_line_infers_the_schema_of_a_registered_source_and_learns_from_it(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["run", str(path), "--label", "click", "--checkpoint", str(tmp_path / "state")]) == 0
    output = capsys.readouterr()
    assert "JSON array" in output.out
    assert "3,000 events" in output.err


def test_a_source_needs_only_iteration_and_its_position() -> None:
    class Minimal(Source):
        def __iter__(self) -> Iterator[Events]:
            yield Events({"x": [1.0]})  # type: ignore[dict-item]

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: Mapping[str, Any]) -> None:
            pass

    source = Minimal()
    assert (source.share, source.backlog(), source.columns()) == (None, None, None)
    check_columns(source, Schema({"x": "number"}))
    with pytest.raises(SamplingError, match="--schema"):
        source.sample()


def test_the_help_of_the_command_line_lists_a_registered_source(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.main(["run", "--help"])
    assert "  array:PATH                      the objects of a JSON array\n" in capsys.readouterr().out
