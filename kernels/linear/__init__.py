"""Linear layers: packed weights, batch-invariant products, experts."""
