"""The server process: signals, standard streams, memory, event loop."""
