"""A kernel in C for AVX2 and AVX-512: packed attention in float32. One source, compiled for the wider set there is.

Test: tests/test_simd.py. Record: attention__*.csv.
"""
