"""Formats in which models write tool calls: how to read, render and force each."""
