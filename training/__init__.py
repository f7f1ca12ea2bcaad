"""How the bundled model is made: a corpus from grammars, a tokenizer, the training and its measurement.

Nothing here is imported at serving time, or installed.
"""
