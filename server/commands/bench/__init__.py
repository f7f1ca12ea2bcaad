"""`pageserve bench`: load for any OpenAI-compatible server, and the figures it gives. No torch, no engine."""

from server.commands.bench.command import main

__all__ = ["main"]
