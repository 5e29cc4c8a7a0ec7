"""What makes the host wait for the device: counted on a GPU, or without one on a pretended device."""
