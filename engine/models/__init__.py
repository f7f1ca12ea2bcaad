"""One decoder and one encoder that data describes, and the reading of their weights."""
