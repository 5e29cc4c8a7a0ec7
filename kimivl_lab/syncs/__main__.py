"""Prints which torch operators make the host wait: `python -m kimivl_lab.syncs`."""

from .rules import UNKNOWN_FUNCTIONS, known

for name, words in known().items():
    print(f"{name:45} {words}")
print(f"\nUnknown: {', '.join(sorted(UNKNOWN_FUNCTIONS))}, and every operator that is not listed.")
