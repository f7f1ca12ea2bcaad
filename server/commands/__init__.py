"""Subcommands of `pageserve` other than serve: chat, generate, run-batch, bench. Also the generated documents."""
