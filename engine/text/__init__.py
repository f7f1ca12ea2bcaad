"""Public: text to token ids and back: tokenizer, detokenizer, chat templates."""
