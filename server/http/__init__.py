"""Decides which HTTP requests are served: connections, sizes, API keys, rate limits, traces. Knows no endpoint."""
