"""`pageserve run-batch`: answers OpenAI batch files with a running server, or with a model loaded in this process."""

from server.commands.batch.command import main

__all__ = ["main"]
