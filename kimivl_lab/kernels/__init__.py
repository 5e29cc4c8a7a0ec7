"""How things are computed: memory, the choice between implementations, and the fast ones."""
