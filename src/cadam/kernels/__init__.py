"""Kernels: the rules printed in the languages that fused engines compile."""
