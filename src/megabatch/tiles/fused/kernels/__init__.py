"""What runs on the device, in Triton's language: the product of a tile, what is made of it, and sums over tiles."""
