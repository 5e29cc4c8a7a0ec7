"""MoonViT: patches in, packed features out, one module a stage."""
