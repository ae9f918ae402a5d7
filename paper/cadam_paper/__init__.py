"""Reproduction of the paper "CAdam: Confidence-Based Optimization for Online Learning".

Every figure and table of the paper is an experiment that `cadam reproduce` computes again. `catalog` lists the
experiments, `harness` runs them and stores their results, and `pages` writes the tables of the documentation.
"""
