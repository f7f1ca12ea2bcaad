"""HTTP itself: connections, limits, bodies, keys, rate limits, traces. Knows no endpoint."""
