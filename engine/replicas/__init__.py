"""Data parallelism: which of several equal Drivers gets a request; and the Engine, what the server sees of them."""
