"""From logits to tokens: parameters by row, bans, grammar masks, thinking budgets, draws, scores of prompts."""
