"""Sharded embedding tables: TorchRec models whose tables are updated by cadam's optimizers during backward.

    model = DistributedModelParallel(module, sharders=[BagSharder(cadam.CAdam, lr=1e-3)])

See docs/large_tables.md and docs/torchrec.md.
"""

from __future__ import annotations

from .versions import find_problem

if reason := find_problem():
    raise ImportError(reason)

from ..distributed.process_group import join, leave
from ..distributed.table_protocol import register_alignment
from .checkpoint import SavedRun, list_checkpoints, load, save
from .serving import ChangedRows, apply_changes, changed_rows, track_changes
from .sharders import BagSharder, SequenceSharder, alignment, iter_tables
from .tables import Tables

register_alignment(alignment)

__all__ = [
    "BagSharder",
    "ChangedRows",
    "SavedRun",
    "SequenceSharder",
    "Tables",
    "alignment",
    "apply_changes",
    "changed_rows",
    "iter_tables",
    "join",
    "leave",
    "list_checkpoints",
    "load",
    "save",
    "track_changes",
]
