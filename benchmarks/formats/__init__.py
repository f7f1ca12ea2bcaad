"""Writes a checkpoint in every layout of quantised weights, and measures what each costs and keeps."""
