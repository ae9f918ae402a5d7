"""The page of commands, docs/cli.md, from the parsers themselves."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from cadam.cli.commands import available_commands
from cadam.cli.main import build_parser

from .published import head, line


def commands() -> list[str]:
    """Every command: what it does, then its arguments."""
    available = available_commands()
    parser = build_parser(available, with_arguments=available)
    subparsers = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return [text for name in sorted(subparsers.choices) for text in _command(name, subparsers.choices[name])]


def _command(name: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    yield from (f"## cadam {name}", "", *_text(parser.description or "").splitlines(), "")
    yield from head("argument", "meaning")
    for action in parser._actions:
        if not isinstance(action, argparse._HelpAction) and action.help is not argparse.SUPPRESS:
            meaning = (action.help or "") % {**vars(action), "prog": f"cadam {name}"}
            yield line(f"`{_spelling(action)}`", _text(meaning).replace("|", "\\|"))
    yield ""


def _text(text: str) -> str:
    """A help text for Markdown, where a star or an angle bracket would mean something."""
    return text.strip().replace("``", "`").replace("*", "\\*").replace("<", "&lt;")


def _spelling(action: argparse.Action) -> str:
    """How it is typed: its longest name, and what it takes."""
    takes = action.metavar or ("{" + ",".join(map(str, action.choices)) + "}" if action.choices else "")
    if isinstance(takes, tuple):
        takes = " ".join(takes)
    if not action.option_strings:
        return f"{takes or action.dest}{'...' if action.nargs in ('*', '+') else ''}".replace("|", "\\|")
    if not takes and action.nargs != 0:
        takes = action.dest.upper()
    return f"{max(action.option_strings, key=len)} {takes}".strip().replace("|", "\\|")
