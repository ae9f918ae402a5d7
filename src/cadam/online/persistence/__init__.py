"""Checkpoints, logs, warm starts and exported models."""
