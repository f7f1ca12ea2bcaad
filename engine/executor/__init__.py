"""The Worker as the Driver sees it: its process, the plans and results between them, restarts and timeouts."""
