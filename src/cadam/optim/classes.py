"""The optimizer classes: `Adam` and `CAdam`, `AdamW` and `CAdamW`, and so on for every entry of the family's table.

They are created from `cadam.rules.family.FAMILY`. Type checkers read their signatures from ``classes.pyi``, which
``python tools/write_stubs.py`` generates.
"""

from ..rules.family import FAMILY
from .optimizer import Optimizer
from .signatures import docstring

__all__ = []

for _member in FAMILY:
    _base = Optimizer
    for _name, _confidence in ((_member.name, False), (f"C{_member.name}", True)):
        _base = type(
            _name,
            (_base,),
            {
                "__module__": __name__,
                "__doc__": docstring(_member, _confidence),
                "rule": _member.rule,
                "confidence": _confidence,
                "new_defaults": _member.defaults,
                "fixed": _member.fixed,
            },
        )
        globals()[_name] = _base
        __all__ += [_name]
