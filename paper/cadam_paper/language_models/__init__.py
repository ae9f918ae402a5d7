"""The study of byte-level language models: optimizers with and without confidence, and control arms."""
