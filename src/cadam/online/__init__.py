"""Learning from a live stream: predict, serve, get the label later, learn; and compare optimizers on it."""
