"""Kernels in C for processors with Intel's matrix extensions (AMX), bfloat16: attention, linear layers, rope."""
