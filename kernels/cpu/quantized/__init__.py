"""Weights in 4 or 8 bits on a CPU: the linear layer over packed codes, and rows of packed matrices."""
