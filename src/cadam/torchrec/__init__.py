"""Sharded embedding tables: the optimizers of the catalogue inside TorchRec, updating in backward.

    model = DistributedModelParallel(module, sharders=[BagSharder(cadam.CAdam, lr=1e-3)])

See docs/scale.md.
"""

from __future__ import annotations

from .versions import problem

if reason := problem():
    raise ImportError(reason)

from .sharders import BagSharder, SequenceSharder, tables_of
from .tables import Tables

__all__ = ["BagSharder", "SequenceSharder", "Tables", "tables_of"]
