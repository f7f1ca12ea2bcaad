"""Structured outputs in a request: schemas, regular expressions and Lark grammars, checked and translated."""
