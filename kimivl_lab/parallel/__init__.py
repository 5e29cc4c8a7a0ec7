"""Encoding on several ranks: data parallel, tensor parallel, the balance between ranks and the choice of the two."""
