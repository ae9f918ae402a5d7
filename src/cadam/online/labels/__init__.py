"""Joining labels with the events they belong to, and the queue of labeled events for training."""
