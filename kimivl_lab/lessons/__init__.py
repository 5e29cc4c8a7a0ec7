"""Code that only the notebooks' lessons need."""
