"""The optimizer classes: `Adam` and `CAdam`, `AdamW` and `CAdamW`, and so on for every entry of the family's table.

They are created from `cadam.rules.family.FAMILY`. As in torch.optim, `AdamW` is a subclass of `Adam`: the classes of a
rule derive from the first one. Type checkers read the signatures from ``classes.pyi``, which
``python tools/write_stubs.py`` generates.
"""

from ..rules import Rule
from ..rules.family import FAMILY
from .optimizer import Optimizer
from .signatures import docstring

__all__ = []

_first_class: dict[Rule, type[Optimizer]] = {}
for _member in FAMILY:
    _plain = type(
        _member.name,
        (_first_class.get(_member.rule, Optimizer),),
        {
            "__module__": __name__,
            "__doc__": docstring(_member, confidence=False),
            "confidence": False,
            "new_defaults": _member.defaults,
            "fixed": _member.fixed,
            **({} if _member.rule in _first_class else {"rule": _member.rule}),
        },
    )
    _first_class.setdefault(_member.rule, _plain)
    _confident = type(
        f"C{_member.name}",
        (_plain,),
        {"__module__": __name__, "__doc__": docstring(_member, confidence=True), "confidence": True},
    )
    globals().update({_plain.__name__: _plain, _confident.__name__: _confident})
    __all__ += [_plain.__name__, _confident.__name__]
