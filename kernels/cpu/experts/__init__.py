"""Mixtures of experts on a CPU: routers, and the experts of a step as two grouped products."""
