"""Decides which form a request asks for: checks and translates JSON schemas, regular expressions and Lark grammars."""
