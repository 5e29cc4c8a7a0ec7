"""From files to patches: reading pictures, counting their sizes, cutting and normalising them."""
