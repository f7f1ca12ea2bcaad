"""Penalties, draws and token masks on logits."""
