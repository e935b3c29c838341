"""Sweeps: grids of experiments, planned, run and followed from one file; and what runs say."""
