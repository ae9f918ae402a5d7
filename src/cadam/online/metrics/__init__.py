"""Metrics over a stream of predictions and labels."""
