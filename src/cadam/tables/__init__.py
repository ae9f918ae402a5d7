"""Embedding tables for ids that come and go: rows are created, shared, expired and evicted while a model learns."""

from .dynamic_embedding import DynamicEmbedding
from .row_assignment import Counters

__all__ = ["Counters", "DynamicEmbedding"]
