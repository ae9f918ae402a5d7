"""Experiments as cells: what one is, where results lie, how they are computed, compared and shown."""
