"""Finds a checkpoint on disk or in a cache and reads its small JSON files. Reads no weights."""
