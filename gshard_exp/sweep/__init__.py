"""Sweeps: grids of experiments, planned, run and followed from one file."""
