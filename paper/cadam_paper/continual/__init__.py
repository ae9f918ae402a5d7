"""The study of continual learning: many tasks one after the other, on CIFAR-10 in JAX."""
