"""The server as a process: signals, standard streams, memory, event loop."""
