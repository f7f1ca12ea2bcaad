"""`pageserve bench`: measures any OpenAI-compatible server under load. Imports no torch and no engine."""

from server.commands.bench.command import main

__all__ = ["main"]
