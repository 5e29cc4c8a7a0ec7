"""Token budgets for CUDA graphs, from the sizes of your images. Plain integers and numpy, no torch."""
