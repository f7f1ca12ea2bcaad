"""Decides, for each format in which models write tool calls, how a call is read, written and forced."""
