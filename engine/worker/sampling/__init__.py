"""Logits to tokens: parameters by row, bans, grammar masks, scores of prompts."""
