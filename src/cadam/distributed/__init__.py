"""Process groups and sharded checkpoints, used by the distributed learner and by TorchRec tables."""
