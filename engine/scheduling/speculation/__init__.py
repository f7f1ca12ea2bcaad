"""Which tokens are guessed ahead, and how many."""
