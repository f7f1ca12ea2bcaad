"""How many guessed tokens are right."""
