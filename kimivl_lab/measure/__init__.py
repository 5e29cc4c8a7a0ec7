"""Measuring: one timing function, host syncs, provenance of the machine, and records that survive a failed run."""
