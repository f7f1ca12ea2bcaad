"""Activations, norms and rotary embedding."""
