"""Sharded embedding tables: the optimizers of the catalogue inside TorchRec, updating in backward.

    model = DistributedModelParallel(module, sharders=[BagSharder(cadam.CAdam, lr=1e-3)])

See docs/scale.md.
"""

from __future__ import annotations

from .versions import problem

if reason := problem():
    raise ImportError(reason)

from ..distributed.process_group import join, leave
from ..distributed.table_protocol import register_alignment
from .checkpoint import Saved, checkpoints, load, save
from .serving import Changed, apply_, changed_rows, track_changes
from .sharders import BagSharder, SequenceSharder, alignment, tables_of
from .tables import Tables

register_alignment(alignment)

__all__ = [
    "BagSharder",
    "Changed",
    "Saved",
    "SequenceSharder",
    "Tables",
    "alignment",
    "apply_",
    "changed_rows",
    "checkpoints",
    "join",
    "leave",
    "load",
    "save",
    "tables_of",
    "track_changes",
]
