"""Penalties, draws and token masks on logits."""

FAILED = -1  # takes the place of the token id of a row whose logits give none
