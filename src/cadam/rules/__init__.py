"""The update rules, one file each: `RULES` finds them in this folder. `rule.py` says what a rule is."""

from importlib import import_module
from pkgutil import iter_modules

from .base import Options, Rule, Step

RULES: dict[str, Rule] = {}
"""Every rule of the package by its name. Each is compiled, and tested on every engine, for being here."""


def __getattr__(name: str) -> Rule:
    """A rule under the name it has in its file: `rules.ADAM`."""
    if name.lower() not in RULES or not name.isupper():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return RULES[name.lower()]


for _file in iter_modules(__path__):
    for _value in vars(import_module(f".{_file.name}", __name__)).values():
        if isinstance(_value, Rule) and RULES.setdefault(_value.name, _value) is not _value:
            raise ValueError(f"two rules are called {_value.name!r}; one of them is in rules/{_file.name}.py")

__all__ = ["RULES", "Options", "Rule", "Step"]
