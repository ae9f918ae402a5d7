"""Checks of the wording of docstrings, comments, help texts, documentation pages and HTML templates.

They catch habits that make a text hard to read: questions as docstrings, clauses without a subject, archaic words,
terms that only this project uses, and British spellings. `python -m tests.test_language PATH...` prints what they find.
"""

from __future__ import annotations

import ast
import html
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.documented import NOTEBOOKS, PAGES, ROOT, cells, prose

NOT_YET_CONVERTED: tuple[str, ...] = ()
"""Packages and modules whose texts are still being rewritten, as paths that start with `src` or `paper`."""

BARE_CLAUSES = re.compile(
    r"(Of|That of|Those|What|Whatever|Whoever|Who|Whom|Whose|Which|Whichever|Such|The same|Ditto|As before)\b"
    r"(?! (?:is|are) )"
    r"|That(?! (?:is|was|means|makes|would|could|can|takes|gives|costs|leaves|keeps|way|module|class|function)\b)\b",
    re.IGNORECASE,
)
"""Beginnings of a text that lacks a subject or points back to another text."""
BARE_DOCSTRINGS = re.compile(
    r"(How|Why|Where|When|So|Or|And|But|Else|As|By(?! default)|From which|On (?:which|how)|In which|With which|To which"
    r"|With(?:out)? those)\b(?!.*, )",
)
"""Beginnings of a docstring that is a clause, such as "How many rows" instead of "Number of rows"."""

ARCHAIC = {
    "anew": "again",
    "at one go": "at once",
    "so many": "up to N, or the number",
    "beware": "warning",
    "goes on|go on|went on|going on": "continues, resumes",
    "of its own|of one's own|of their own": "its own, separate",
    "of ours|of yours": "our, your",
    "such a one|such ones": "the noun",
    "has it that|as \\w+ has it": "according to",
    "(?:is|are) told of|(?:is|are) said": "is reported, is logged",
    "learnt": "learned",
    "mended|mend": "fixed",
    "(?<!there )(?:is|are) no(?! longer| more)": "is not, are not",
    "whence|whither|thereof|therein": "from where",
    "lest": "so that ... not",
    "nor does|nor is|nor are": "and ... not",
    "who(?:m)?ever|whatsoever": "anyone who, any",
    "let alone": "and certainly not",
    "nobody|somebody|everybody": "no one, the user, or the passive voice",
    "at the least": "at least",
    "(?:is|are) to be": "must be, will be",
    "go(?:es)? by": "depends on, uses",
    "but for": "except for",
    "(?:is|are|was|were) told": "is updated with, gets",
    "ours|theirs": "the noun",
    "at hand": "available",
    "ere|amongst|whilst": "before, among, while",
    "of which none|of which there": "a complete sentence",
    "made out of": "made from",
}
"""Archaic or translated wording, as regular expressions, and what to write instead."""

PRIVATE = {
    "(?:light|coded) moments?": "quantized moments",
    "coded (?:state|values?|buffers?)": "quantized state",
    "planted": "simulated",
    "tak(?:e|es|en|ing) over|took over": "warm start",
    "wrong labels": "label noise",
    "images that (?:turn|jump)": "continuous shift, sudden shift",
    "(?:set|put)s? aside": "rejected",
    "poison(?:ed)?": "rejected",
    "prepared steps?": "step replay",
    "event by event": "per-event training",
    "stand-ins?": "placeholder",
    "rates of hindsight": "best learning rate in hindsight",
    "seeds alone": "noise floor",
    "watched interval": "confidence sequence",
    "(?:first|other) arm": "baseline, treatment",
    "strange labels?": "orphan label",
    "told right": "classified correctly",
    "left the numbers": "diverged",
    "row v": "one second moment per row",
}
"""Terms that only this project used, as regular expressions, and the common term."""

BRITISH = re.compile(
    r"\b(?:\w*(?:behaviour|colour|favour|honour|neighbour|labour|flavour)\w*|grey|catalogue[sd]?|centred?|metres?|artefacts?|whilst"
    r"|labell(?:ed|ing)|unlabelled|modell(?:ed|ing)|travell(?:ed|ing)|cancell(?:ed|ing)|signall(?:ed|ing)|judgement"
    r"|fulfil|licence|defence|analys(?:e|es|ed|ing)|learnt|spelt|burnt"
    r"|(?:\w+)(?:al|ar|im|in|er|an|or|ic|id|ot|mar|tim|gn)is(?:e|es|ed|ing|ation)(?<!promise)(?<!promised)(?<!exercise)"
    r"(?<!premise)(?<!raise)(?<!raises)(?<!raised)(?<!raising)(?<!noise)(?<!precise)(?<!concise)(?<!otherwise)"
    r"(?<!surprise)(?<!comprise)(?<!comprises)(?<!enterprise)(?<!rise)(?<!arise)(?<!arises)(?<!wise)(?<!revise)"
    r"(?<!advise)(?<!supervise)(?<!supervised)(?<!improvise)(?<!devise)(?<!compromise)(?<!organism)(?<!practise))\b",
    re.IGNORECASE,
)


MAX_WORDS = 40
"""The words of the longest sentence of a documentation page."""
TEMPLATES = sorted(path for folder in ("src", "paper") for path in (ROOT / folder).rglob("*.html*"))
"""The HTML templates of the reports and of the status page."""


@dataclass(frozen=True)
class Text:
    """A text and the line where it starts."""

    kind: str
    """`docstring`, `comment`, `help text`, `page` for prose of a page, or `cell` for a cell of its tables."""
    line: int
    content: str


def python_texts(source: str) -> Iterator[Text]:
    """Yield the docstrings, comments and help texts of Python source code."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield Text("docstring", node.lineno, node.value.value)
        if isinstance(node, ast.keyword) and node.arg in ("help", "description", "epilog"):
            words = "".join(
                part.value
                for part in ast.walk(node.value)
                if isinstance(part, ast.Constant) and isinstance(part.value, str)
            )
            yield Text("help text", node.value.lineno, words)
    yield from _comments(source)


def _comments(source: str) -> Iterator[Text]:
    """Yield the comments. Lines of a comment that has the same column on consecutive lines are joined."""
    block: list[str] = []
    first = last = column = -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or re.match(r"# (noqa|type:|fmt:|-|=)|#!|#:", token.string):
            continue
        line, start = token.start
        is_alone = not token.line[:start].strip()
        if block and is_alone and line == last + 1 and start == column:
            block.append(token.string.lstrip("#").strip())
        else:
            if block:
                yield Text("comment", first, " ".join(block))
            block, first, column = [token.string.lstrip("#").strip()], line, start if is_alone else -1
        last = line
    if block:
        yield Text("comment", first, " ".join(block))


def c_texts(source: str) -> Iterator[Text]:
    """Yield the comments of C source code. Consecutive `//` lines are joined."""
    for match in re.finditer(r"/\*.*?\*/|(?://[^\n]*(?:\n[ \t]*(?=//))?)+", source, re.DOTALL):
        words = re.sub(r"^\s*(?:/\*+|\*+/|\*|//+)\s?", "", match[0], flags=re.MULTILINE).replace("*/", "")
        yield Text("comment", source[: match.start()].count("\n") + 1, words.strip())


def template_texts(template: str) -> Iterator[Text]:
    """Yield the texts of the elements of an HTML template."""
    template = re.sub(r"<(script|style|svg)\b.*?</\1>|\{#.*?#\}|\{%.*?%\}", "\n\n", template, flags=re.DOTALL)
    template = re.sub(r"<code>.*?</code>|\{\{.*?\}\}", "CODE", template, flags=re.DOTALL)
    template = re.sub(r"</?(?!(?:a|b|i|em|strong|br)\b)[a-z][^>]*>", "\n\n", template)
    plain = html.unescape(re.sub(r"<[^>]+>", " ", template))
    yield from (Text("page", 1, " ".join(part.split())) for part in re.split(r"\n\s*\n", plain) if part.strip())


def problems(text: Text) -> list[str]:
    """Describe the bad habits in a text."""
    # Examples and code are not prose: `>>>` and indented blocks after "Example:", and everything in backquotes.
    prose = re.sub(r"```.*?```", "", text.content, flags=re.DOTALL)
    prose = re.sub(r"``.*?``|`[^`]*`", "CODE", prose, flags=re.DOTALL)
    prose = re.sub(r"^\s*(?:>>>|\.\.\.) .*$|^ {4,}\S.*::\n", "", prose, flags=re.MULTILINE)
    prose = re.sub(r"https?://\S+", "URL", prose)
    plain = " ".join(prose.split())
    result = []
    if text.kind in ("docstring", "comment") and re.search(r"\w[)\"']*\?(?:\s|$)", plain):
        result.append("a question: write a statement, as in 'Whether ...'")
    match = None if text.kind == "page" else BARE_CLAUSES.match(plain)
    if match is None and text.kind == "docstring":
        match = BARE_DOCSTRINGS.match(plain.partition(". ")[0])
    if match:
        result.append(f"begins with {match[0]!r}: write a complete sentence that names its subject")
    if text.kind == "docstring" and plain and not re.search(r"(?:[.!:]|CODE|URL)[)\"']*$", _first_paragraph(prose)):
        result.append("its first paragraph does not end with a period")
    quoted = re.sub(r"\"[^\"]*\"|“[^”]*”", "", plain)
    for words, kind in ((ARCHAIC, "archaic or translated"), (PRIVATE, "a private term")):
        for pattern, instead in words.items():
            if match := re.search(rf"\b(?:{pattern})\b", quoted, re.IGNORECASE):
                result.append(f"{match[0]!r} is {kind}: write {instead}")
    if match := BRITISH.search(quoted):
        result.append(f"{match[0]!r} is British spelling")
    return result


def split_sentences(paragraph: str) -> list[str]:
    """Split a paragraph at its periods, colons, question and exclamation marks."""
    return re.split(r"(?<=[.!?:])[\"”)*]* +(?=[A-Z*(\[0-9]|code\b)", paragraph)


def _first_paragraph(text: str) -> str:
    return re.split(r"\n\s*\n", text.strip())[0]


def check(path: Path) -> list[str]:
    """List the problems of a source file, one line each."""
    source = path.read_text(encoding="utf-8")
    texts = python_texts(source) if path.suffix == ".py" else c_texts(source)
    return [
        f"{path}:{text.line}: {text.kind}: {problem}\n    {' '.join(text.content.split())[:160]}"
        for text in texts
        for problem in problems(text)
    ]


def source_files(folder: Path) -> list[Path]:
    """List the Python and C files of a folder, or the file itself."""
    if folder.is_file():
        return [folder]
    return sorted(path for path in folder.rglob("*") if path.suffix in (".py", ".c", ".h"))


def _packages() -> list[Path]:
    """List the folders and modules that are checked: each member of src/cadam, the paper, benchmarks and examples."""
    members = (path for path in (ROOT / "src" / "cadam").iterdir() if source_files(path) and path.name != "__pycache__")
    return [*sorted(members), *(ROOT / name for name in ("paper/cadam_paper", "benchmarks", "examples"))]


@pytest.mark.parametrize("package", _packages(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_texts_of_the_package_are_plain(package: Path) -> None:
    excluded = tuple(ROOT / name for name in NOT_YET_CONVERTED)
    files = [path for path in source_files(package) if not any(path.is_relative_to(one) for one in excluded)]
    found = [problem for path in files for problem in check(path)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "page",
    [*PAGES, *NOTEBOOKS],
    ids=lambda page: page.name,
)
def test_words_of_the_page_are_plain(page: Path) -> None:
    texts = [*(Text("page", 1, part) for part in prose(page)), *(Text("cell", 1, cell) for cell in cells(page))]
    found = [f"{problem}\n    {text.content}" for text in texts for problem in problems(text)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("page", [*PAGES, *NOTEBOOKS], ids=lambda page: page.name)
def test_sentences_of_the_page_are_short(page: Path) -> None:
    sentences = [sentence for part in prose(page) if "$$" not in part for sentence in split_sentences(part)]
    assert [sentence for sentence in sentences if len(sentence.split()) > MAX_WORDS] == []


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda template: template.name)
def test_texts_of_the_template_are_plain(template: Path) -> None:
    texts = list(template_texts(template.read_text(encoding="utf-8")))
    found = [f"{problem}\n    {text.content}" for text in texts for problem in problems(text)]
    assert not found, "\n".join(found)


def test_every_exception_exists() -> None:
    assert [name for name in NOT_YET_CONVERTED if not (ROOT / name).exists()] == []


GOOD = [
    Text("docstring", 1, "Whether the engine supports stochastic rounding."),
    Text("docstring", 1, "Return the loss.\n\nArgs:\n    closure: evaluates the model again."),
    Text("docstring", 1, "Rows of the table: `table[what?]`."),
    Text("comment", 1, "Invalidate the plan first: if the step raises, the next one must rebuild it."),
    Text("comment", 1, "That is why the lock is taken here."),
    Text("comment", 1, "a new parameter is the last entry of self.state"),
    Text("docstring", 1, "Raise an error for noise that is otherwise precise."),
    Text("docstring", 1, "When the file exists, replace it."),
    Text("help text", 1, "how long to wait, and the width of the embeddings (default: 8)"),
]

BAD = [
    (Text("cell", 1, "those of the batch"), "begins with 'those'"),
    (Text("docstring", 1, "Can it?"), "question"),
    (Text("docstring", 1, "Does a parameter have other memory?\n\nArgs:\n    p: the parameter."), "question"),
    (Text("docstring", 1, "The same for rows."), "begins with 'The same'"),
    (Text("docstring", 1, "That of each row, in the shape of the buffer."), "begins with 'That of'"),
    (Text("docstring", 1, "Who does not want steps to be replayed, if anyone."), "begins with 'Who'"),
    (Text("comment", 1, "of one that is new, which is the last"), "begins with 'of'"),
    (Text("comment", 1, "what raises leaves no plan behind"), "begins with 'what'"),
    (Text("comment", 1, "that there are at the least"), "begins with 'that'"),
    (Text("docstring", 1, "How many of the first events are used."), "begins with 'How'"),
    (Text("docstring", 1, "Elements quantized at once"), "period"),
    (Text("docstring", 1, "Compute the loss anew."), "'anew' is archaic"),
    (Text("help text", 1, "wait so many seconds"), "'so many' is archaic"),
    (Text("docstring", 1, "Restore light moments."), "'light moments' is a private term"),
    (Text("comment", 1, "normalise the rows"), "'normalise' is British"),
    (Text("comment", 1, "the behaviour of torch"), "'behaviour' is British"),
    (Text("comment", 1, "serialised labelled events"), "'serialised' is British"),
]


@pytest.mark.parametrize("text", GOOD, ids=lambda text: text.content[:40])
def test_a_plain_text_has_no_problem(text: Text) -> None:
    assert problems(text) == []


@pytest.mark.parametrize(
    ("text", "problem"), BAD, ids=lambda value: value.content[:40] if isinstance(value, Text) else ""
)
def test_a_bad_habit_is_found(text: Text, problem: str) -> None:
    assert any(problem in found for found in problems(text))


def test_texts_are_found_with_their_lines() -> None:
    source = (
        '"""A module."""\n\nWIDTH = 8  # columns\n"""Columns of a table."""\n\n# One comment\n# on two lines.\n'
        'parser.add_argument("--width", help=f"columns of {name}")\n'
    )
    assert sorted(python_texts(source), key=lambda text: text.line) == [
        Text("docstring", 1, "A module."),
        Text("comment", 3, "columns"),
        Text("docstring", 4, "Columns of a table."),
        Text("comment", 6, "One comment on two lines."),
        Text("help text", 8, "columns of "),
    ]
    assert list(c_texts("int a; /* One\n * comment. */\n// Another\n// one.\nint b;\n")) == [
        Text("comment", 1, "One\ncomment."),
        Text("comment", 3, "Another\none."),
    ]


def test_a_paragraph_is_split_into_sentences() -> None:
    paragraph = "One (two). code is 1.5 of e.g. three: four. Five?"
    assert split_sentences(paragraph) == ["One (two).", "code is 1.5 of e.g. three: four.", "Five?"]


def test_texts_of_a_template_are_its_elements() -> None:
    template = (
        "<style>p {}</style><p>One {{ name }}\n<b>two</b></p>{% if x %}<td title='no'>three &amp; <code>no</code></td>"
    )
    assert [text.content for text in template_texts(template)] == ["One CODE two", "three & CODE"]


if __name__ == "__main__":
    for name in sys.argv[1:] or ["src/cadam", "paper/cadam_paper"]:
        for file in source_files(Path(name)):
            print("\n".join(check(file)), end="\n" if check(file) else "")
