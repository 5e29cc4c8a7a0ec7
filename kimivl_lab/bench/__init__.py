"""Benchmarks, one module each, runnable alone: `python -m kimivl_lab.bench.<name> --help`."""
