"""Decides whether the form of a structured output compiles within limits, in a process that can be killed."""
