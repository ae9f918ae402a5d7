"""The optimizer classes and everything built around `torch.optim.Optimizer`."""
