"""One decoder that data describes, also with the attention of encoders, and the reading of its weights."""
