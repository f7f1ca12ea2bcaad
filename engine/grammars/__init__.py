"""Decides whether the form of a structured output compiles, in a process that may be killed."""
