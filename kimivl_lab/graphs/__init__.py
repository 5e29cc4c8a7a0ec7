"""Captured forwards by token budget: packed, replayed and copied out, on CUDA and on the CPU."""
