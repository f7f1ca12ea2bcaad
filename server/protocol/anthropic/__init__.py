"""Decides which requests /v1/messages accepts, and which chat request each of them stands for."""
