"""Kernels of the sampler on a CPU: which tokens may be drawn."""
