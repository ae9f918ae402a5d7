"""The update rules and what surrounds them.

- One file per rule (`adam`, `sgdm`, `lion`, ...): its formula, its paper and its defaults. `RULES` collects them.
- `base`: the contract of a rule.
- `update`: weight decay, the confidence mask and the step, written once around every rule.
- `defaults`: the options that all optimizers share, with their defaults.
- `moment_storage`: the formats of quantized optimizer state.
"""

from importlib import import_module
from pkgutil import iter_modules

from .base import Options, Rule, Step

RULES: dict[str, Rule] = {}
"""Every rule of the package by its name. A rule file in this folder is registered automatically; its kernels are
compiled and it is tested on every engine."""


def __getattr__(name: str) -> Rule:
    """Return a rule by the name of its constant, such as `rules.ADAM`."""
    if name.lower() not in RULES or not name.isupper():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return RULES[name.lower()]


for _file in iter_modules(__path__):
    for _value in vars(import_module(f".{_file.name}", __name__)).values():
        if isinstance(_value, Rule) and RULES.setdefault(_value.name, _value) is not _value:
            raise ValueError(f"two rules are called {_value.name!r}; one of them is in rules/{_file.name}.py")

__all__ = ["RULES", "Options", "Rule", "Step"]
