"""Decides how the prompt describes tools, how a grammar forces calls, and how calls are read out of a model's text."""
