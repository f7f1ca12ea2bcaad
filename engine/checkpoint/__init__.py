"""Where a model lies on disk or in a cache, and its small JSON files; no weights are read here."""
