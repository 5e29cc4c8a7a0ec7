"""Kernels in C for processors with Intel's matrix extensions (AMX), bfloat16: attention, linear layers, rope.

Test: tests/test_amx.py. Record: attention__*__bfloat16__*.csv, rope__*__bfloat16__*.csv, encoder__*__bfloat16__*.csv.
"""
