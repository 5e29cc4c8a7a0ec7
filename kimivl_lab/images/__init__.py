"""From files to patches: reading images, counting their sizes, cutting and normalising them."""
