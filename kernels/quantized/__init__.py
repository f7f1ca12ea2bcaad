"""Weights in 4 or 8 bits: what their codes mean, and the linear layer over them."""
