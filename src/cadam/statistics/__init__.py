"""Intervals, confidence sequences and paired comparisons."""
