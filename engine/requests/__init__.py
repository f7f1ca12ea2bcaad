"""A live request from its arrival to its end: limits, stream, delivery of outputs."""
