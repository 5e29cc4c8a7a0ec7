"""CUDA graphs by token budget: planned, packed, captured and replayed, on CUDA and on the CPU."""
