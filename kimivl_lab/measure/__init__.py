"""Measuring: one timing function, provenance of the machine, and records that survive a failed run."""
