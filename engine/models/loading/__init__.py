"""Reads the weight files of a checkpoint: which files, which container, and which tensor goes where in the model."""
