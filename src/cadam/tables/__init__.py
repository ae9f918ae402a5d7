"""Embedding tables for ids that come and go: rows are created, shared, expired and evicted while a model learns."""
