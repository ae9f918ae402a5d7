"""Generation of the command reference, docs/cli.md, from the argument parsers."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from cadam.cli.commands import COMMANDS
from cadam.cli.main import build_parser

from .commands import COMMANDS as PAPER_COMMANDS
from .published import table_header, table_row


def commands() -> list[str]:
    """Return the Markdown of every command in the order of `cadam --help`: its description and its arguments.

    Commands of other installed packages are left out.
    """
    documented = {command.name: command for command in (*COMMANDS, *PAPER_COMMANDS)}
    parser = build_parser(documented, with_arguments=documented)
    subparsers = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return [text for name in subparsers.choices for text in _command(name, subparsers.choices[name])]


def _command(name: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    yield from (f"## cadam {name}", "", *_escape(parser.description or "").splitlines(), "")
    yield from table_header("argument", "meaning")
    for action in parser._actions:
        if not isinstance(action, argparse._HelpAction) and action.help is not argparse.SUPPRESS:
            meaning = (action.help or "") % {**vars(action), "prog": f"cadam {name}"}
            yield table_row(f"`{_usage(action)}`", _escape(meaning).replace("|", "\\|"))
    yield ""


def _escape(text: str) -> str:
    """Escape the characters of a help text that have a meaning in Markdown."""
    return text.strip().replace("``", "`").replace("*", "\\*").replace("<", "&lt;")


def _usage(action: argparse.Action) -> str:
    """Return an argument as it is typed: its longest name and the placeholder of its value."""
    placeholder = action.metavar or ("{" + ",".join(map(str, action.choices)) + "}" if action.choices else "")
    if isinstance(placeholder, tuple):
        placeholder = " ".join(placeholder)
    if not action.option_strings:
        return f"{placeholder or action.dest}{'...' if action.nargs in ('*', '+') else ''}".replace("|", "\\|")
    if not placeholder and action.nargs != 0:
        placeholder = action.dest.upper()
    return f"{max(action.option_strings, key=len)} {placeholder}".strip().replace("|", "\\|")
