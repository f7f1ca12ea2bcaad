"""What the papers claim for continuous batching and paged memory, measured on a CPU: python -m benchmarks.claims."""
