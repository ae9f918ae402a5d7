"""Opening sources by a URI or a path. `cadam.sources_and_metrics` has the kinds of sources."""

from __future__ import annotations

from pathlib import Path
from pkgutil import resolve_name

from .... import sources_and_metrics
from ..schema import Schema
from .base import Source
from .line_files import BYTE_ORDER_MARK, is_compressed, open_binary

PARQUET_MAGIC = b"PAR1"
"""The first bytes of every Parquet file."""
PLACEHOLDER_SCHEMA = Schema({"placeholder": "number"})
"""The schema with which a source is opened to take a sample, when there is no schema yet."""


def implementations() -> dict[str, str]:
    """Return the classes of the sources, as `MODULE:NAME`, by the schemes of their URIs."""
    return {scheme: source.implementation for source in sources_and_metrics.SOURCES for scheme in source.schemes}


def scheme_of_suffix(path: Path) -> str | None:
    """Return the scheme that the suffix of a file name implies, if any."""
    suffix = (path.with_suffix("").suffix if is_compressed(path) else path.suffix).lower()
    return next((source.suffixes[suffix] for source in sources_and_metrics.SOURCES if suffix in source.suffixes), None)


def resolve_uri(text: str) -> str:
    """Return the URI of a source that is given as a URI or as a path.

    Raises:
        ValueError: If the format of standard input is missing, or if a file is not Parquet but the URI says so.
        FileNotFoundError: If the text is neither a URI nor an existing path.
    """
    if text == "-":
        raise ValueError("the format of standard input (-) is unknown: give csv:- or jsonl:-")
    path = Path(text)
    scheme, _, location = text.partition(":")
    if scheme in implementations() and not path.exists():
        if scheme == "parquet" and Path(location).is_file() and (likely := resolve_uri(location)) != text:
            raise ValueError(f"{location} is not a Parquet file; did you mean {likely}?")
        return text
    if path.is_dir():
        return f"parquet:{text}"
    if not path.is_file():
        raise _with_source_help(FileNotFoundError(f"{text} does not exist"))
    with open_binary(path, buffered=True) as file:
        start = file.read(64).lstrip(BYTE_ORDER_MARK + b" \r\n\t")
    if start.startswith(PARQUET_MAGIC):
        return f"parquet:{text}"
    is_json = start[:1] in (b"{", b"[")
    return f"{scheme_of_suffix(path) or ('jsonl' if is_json else 'csv')}:{text}"


def open_source(
    uri: str, schema: Schema, *, batch_size: int = 1024, follow: bool = False, patience: float | None = 1.0
) -> Source:
    """Open the source that a URI names.

    Args:
        uri: A URI such as ``csv:clicks.csv`` or ``redis://localhost:6379/clicks``.
        schema: The schema of the events.
        batch_size: The number of events per batch.
        follow: Whether to wait for more data at the end.
        patience: The number of seconds to wait for a full batch before a smaller one is produced. None: wait as long as
            it takes.

    Raises:
        ValueError: If the URI does not name a source.

    Example:
        >>> open_source("csv:clicks.csv", Schema({"price": "number"}, label="click"))  # doctest: +SKIP
    """
    source: Source | None = None
    if implementation := implementations().get(uri.partition(":")[0]):
        kind: type[Source] = resolve_name(implementation)
        source = kind.from_uri(uri, schema, batch_size=batch_size, follow=follow, patience=patience)
    if source is None:
        raise _with_source_help(ValueError(f"{uri!r} is not a source"))
    return source


def _with_source_help(error: Exception) -> Exception:
    """Add the list of sources to an error as a note, which commands print with its line breaks."""
    error.add_note(f"a source is one of\n{sources_and_metrics.source_help()}".rstrip())
    return error
