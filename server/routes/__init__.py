"""One module per endpoint. No route imports another."""
