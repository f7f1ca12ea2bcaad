"""Decides which requests /v1/responses accepts, and which chat request each of them stands for."""
