"""How the bundled model is made: a corpus from grammars, a tokenizer, the training and its measurement.

The server neither imports nor installs these modules.
"""
