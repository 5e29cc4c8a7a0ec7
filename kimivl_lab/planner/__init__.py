"""Token budgets from the sizes of your own images; plain integers, no torch."""
