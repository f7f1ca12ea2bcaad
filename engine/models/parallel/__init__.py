"""Tensor parallelism: which part of the model a rank holds, and how the ranks of a group add and collect."""
