"""Text that is safe to print: names, values and messages from data cannot control a terminal or forge a line."""

from __future__ import annotations

import logging
import re
import shlex

_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, line separators, characters that reorder text, and bytes of file names that are not UTF-8."""


def printable(text: object) -> str:
    r"""Convert a value to one line of text, and replace every character that a terminal would act on by its escape.

    >>> printable("price\x1b[2J\n")
    'price\\x1b[2J\\n'
    """
    return _UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape", "surrogatepass").decode(), str(text))


def printable_lines(text: object) -> str:
    """Make a text of several lines printable; its line breaks stay."""
    return "\n".join(map(printable, str(text).split("\n")))


def escape_log_record(record: logging.LogRecord) -> bool:
    """Make the message of a log record printable. This is a filter for `logging.Logger.addFilter`."""
    record.msg, record.args = printable(record.getMessage()), None
    return True


def shell_word(text: object) -> str:
    r"""Quote a text as one word of a shell command that can be shown and pasted.

    A text with control characters is quoted as ``$'...'``, which bash, zsh and ksh decode.

    >>> print(shell_word("it's new"), shell_word("a\x1bb"))
    'it'"'"'s new' $'a\x1bb'
    """
    word = str(text)
    if not _UNPRINTABLE.search(word):
        return shlex.quote(word)
    escaped = re.sub(r"[\\']", r"\\\g<0>", word)
    return f"$'{_UNPRINTABLE.sub(_escape_bytes, escaped)}'"


def _escape_bytes(match: re.Match[str]) -> str:
    is_byte = "\udc80" <= match[0] <= "\udcff"  # a byte of a file name that is not UTF-8
    content = match[0].encode("utf-8", "surrogateescape" if is_byte else "surrogatepass")
    return "".join(f"\\x{byte:02x}" for byte in content)
