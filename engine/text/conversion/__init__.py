"""Tokenizers of checkpoints without tokenizer.json: sentencepiece, tiktoken and tekken files, read without packages."""
