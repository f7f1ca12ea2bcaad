"""The HTTP server and the `pageserve` command."""
