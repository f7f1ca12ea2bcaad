"""Subcommands of `pageserve` other than serve: chat, generate, run-batch, bench, the config documents."""
