"""A kernel in C for AVX2 and AVX-512, float32: packed attention. One source, compiled for the wider set that is there.

Test: tests/test_simd.py. Record: attention__*__float32__*.csv.
"""
