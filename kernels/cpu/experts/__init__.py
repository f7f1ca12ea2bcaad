"""Mixtures of experts on a CPU: the router, and the experts of a step as two grouped products (kernels/linear/moe.py)."""
