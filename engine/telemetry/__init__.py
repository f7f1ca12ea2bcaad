"""Public: counts what happens and shows it (metrics, step log, KV view, request log)."""
