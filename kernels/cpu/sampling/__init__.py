"""Kernels of the sampler on a CPU: the draw of a token, and which tokens may be drawn."""
