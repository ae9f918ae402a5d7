"""The site, built by `make docs` from the Markdown beside this file: sphinx-build docs build/site."""

import inspect
import json
import re
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.utils.math import latex2mathml
from myst_parser.parsers.sphinx_ import MystParser

project, author = "cadam", "the cadam authors"
html_title, html_theme = "cadam", "furo"
pygments_dark_style = "github-dark"
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
source_suffix = {".md": "markdown", ".ipynb": "notebook"}
exclude_patterns = ["reports"]
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence", "dollarmath", "html_image"]
suppress_warnings = ["myst.header"]
autodoc_member_order = "bysource"
autodoc_typehints = "none"
add_module_names = False
default_role = "code"
highlight_language = "text"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_math_renderer = "mathml"
html_show_sphinx, html_show_copyright = False, False
html_copy_source = False
copybutton_exclude = ".linenos, .gp, .go"


class NotebookParser(MystParser):
    """A notebook as a page: its text, its code, and what the code printed or drew when it was last executed."""

    supported = ("notebook",)

    def parse(self, inputstring: str, document: Any) -> None:
        super().parse("\n\n".join(_cells(json.loads(inputstring))), document)


def _cells(notebook: Any) -> list[str]:
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {})
            text = "".join(output.get("text", data.get("text/plain", "")))
            if "image/png" in data:
                parts.append(
                    '<img alt="Drawn by the code above" '
                    f'src="data:image/png;base64,{"".join(data["image/png"]).strip()}">'
                )
            elif text:
                parts.append(f"```text\n{text.rstrip()}\n```")
    return parts


NUMBERS = re.compile(
    r"\[[+-]?\d[\d.]*, [+-]?\d[\d.]*\]|[+-]\d[\d.,]*%?|\d[\d.]*e-\d+"
)
"""Numbers that a browser would break at their sign, and intervals."""

OPTIONS = re.compile(r'<span class="pre">(--?[a-z][a-z-]{1,20})</span>')
"""Options of commands, which a browser would break at their dashes."""


def _finish_page(
    app: Any, page: str, template: str, context: dict[str, Any], doctree: Any
) -> None:
    """Let links to reports, results and examples open them, and break lines at good places.

    Options and numbers stay in one line. In tables, long names of code may break after their parts.
    """
    body = context.get("body", "").replace(' download=""', "")
    body = OPTIONS.sub(r'<span class="pre number">\1</span>', body)
    body = re.sub(r"<td>.*?</td>", _break_names, body, flags=re.DOTALL)
    parts = re.split(
        r"(<(pre|math|style|script)\b.*?</\2>)", body, flags=re.DOTALL
    )
    # re.split returns, in turn, the text outside, the element, and its name.
    parts[::3] = [
        re.sub(r"(?<=>)[^<>]+(?=<)", _keep_numbers, part) for part in parts[::3]
    ]
    del parts[2::3]
    context["body"] = "".join(parts)


def _keep_numbers(text: re.Match[str]) -> str:
    return NUMBERS.sub(r'<span class="number">\g<0></span>', text[0])


def _break_names(cell: re.Match[str]) -> str:
    def mark(name: re.Match[str]) -> str:
        return re.sub(r"(?<=[_.,=/])(?=\w)", "<wbr>", name[0])

    return re.sub(r'(?<=<span class="pre">)[^<]{13,}', mark, cell[0])


def _from_the_root(
    app: Any, path: Path, parent: str, content: list[str]
) -> None:
    """Lead links of README and CONTRIBUTING to their pages, and drop comments, which would end a list."""
    content[0] = (
        re.sub(r"^<!-- .* -->\n", "", content[0], flags=re.MULTILINE)
        .replace("](CONTRIBUTING.md", "](docs/contributing.md")
        .replace("](CITATION", "](../CITATION")
    )


def _constructor(
    app: Any,
    what: str,
    name: str,
    thing: Any,
    options: Any,
    signature: Any,
    returns: Any,
) -> Any:
    """A class has the signature of its constructor, also where it is made by a `__new__` that takes anything."""
    if what != "class" or "__init__" not in vars(thing):
        return None
    _, *others = inspect.signature(thing.__init__).parameters.values()
    plain = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in others
    ]
    return str(inspect.Signature(plain)), ""


# Formulas --------------------------------------------------------------------------------------------------------

SYMBOLS = {
    "b1": r"\beta_1",
    "b2": r"\beta_2",
    "eps": r"\epsilon",
    "mhat": r"\hat{m}",
    "vhat": r"\hat{v}",
    "shat": r"\hat{s}",
    "mu": r"\mu",
    "rho_inf": r"\rho_\infty",
    "rho_t": r"\rho_t",
    "r_t": "r_t",
    "sqrt": "sqrt",
    "sign": r"\operatorname{sign}",
}
"""Names in the formulas of docstrings, and their LaTeX. Other words are text."""


def latex(line: str) -> str:
    """Return the LaTeX of formulas as docstrings write them, such as ``m <- m + (1-b1)(g - m)``.

    Formulas of a line are separated by several spaces. Docstrings are also read in a terminal, so they do not contain
    LaTeX themselves.
    """
    parts = [_formula(part) for part in re.split(r" {3,}", line.strip())]
    return r" \qquad ".join(parts)


def _formula(text: str) -> str:
    text = re.sub(r"[a-z]+_(?:inf|t)|[a-z]+\d?|[A-Z]\w+", _symbol, text)
    text = (
        text.replace("<-", r"\leftarrow ")
        .replace("<=", r"\le ")
        .replace(" * ", r"\, ")
    )
    while "sqrt(" in text:
        start = text.index("sqrt(")
        end, depth = start + 5, 1
        while depth:
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        text = f"{text[:start]}\\sqrt{{{text[start + 5 : end - 1].strip()}}}{text[end:]}"
    return text


def _symbol(found: re.Match[str]) -> str:
    name = found[0]
    if name in SYMBOLS:
        return SYMBOLS[name]
    return name if len(name) == 1 else rf"\text{{ {name} }}"


def _render_formula(self: Any, node: Any) -> None:
    """Write a formula as MathML, which browsers draw without a script and without fonts from elsewhere."""
    block = node.tagname == "math_block"
    formula = latex2mathml.tex2mathml(node.astext(), as_block=block)
    self.body.append(f'<div class="math">{formula}</div>' if block else formula)
    raise nodes.SkipNode


# Docstrings of optimizers ------------------------------------------------------------------------------------------


def _optimizer_docstring(
    app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]
) -> None:
    """Typeset the formulas of an optimizer, and list the options that all optimizers share only for CAdam.

    The docstring of their module is for readers of the code, and is left out.
    """
    if what == "module" and name == "cadam.optim.classes":
        lines.clear()
    if what != "class" or not name.startswith("cadam.optim.classes."):
        return
    own = set(thing.rule.defaults) | {
        "params",
        *thing.new_defaults,
        *thing.fixed,
    }
    text = re.sub(
        r"\n((?:    \S.*\n)+)",
        _formula_block,
        "\n".join(lines).partition("\n:param ")[0],
    )
    arguments = re.findall(
        r"^:param .*(?:\n(?!:param |\n).*)*", "\n".join(lines), re.MULTILINE
    )
    rest = "\n".join(lines).partition(arguments[-1])[2]
    if thing.__name__ != "CAdam":
        arguments = [
            each for each in arguments if each.split()[1].strip(":\\") in own
        ]
        arguments.append(
            ":param others: All other options are those of :class:`~cadam.optim.classes.CAdam`."
        )
    lines[:] = [
        *text.splitlines(),
        "",
        *"\n".join(arguments).splitlines(),
        *rest.splitlines(),
    ]


def _formula_block(found: re.Match[str]) -> str:
    rows = r" \\ ".join(f"& {latex(line)}" for line in found[1].splitlines())
    return f"\n.. math:: \\begin{{aligned}} {rows} \\end{{aligned}}\n"


def setup(app: Any) -> None:
    app.add_html_math_renderer(
        "mathml", (_render_formula, None), (_render_formula, None)
    )
    # After napoleon, which turns "Args:" into fields.
    app.connect("autodoc-process-docstring", _optimizer_docstring, priority=900)
    app.connect("autodoc-process-signature", _constructor)
    app.connect("include-read", _from_the_root)
    app.add_source_parser(NotebookParser)
    app.connect("html-page-context", _finish_page)
