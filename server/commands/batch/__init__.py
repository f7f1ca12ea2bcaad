"""`pageserve run-batch`: OpenAI batch files, against a server or a model loaded here."""

from server.commands.batch.command import main

__all__ = ["main"]
