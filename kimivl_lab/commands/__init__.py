"""The command line, `kimivl-lab`."""
