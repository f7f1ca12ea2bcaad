"""The small language model that ships with pageserve: a folder of data that any LLaMA loader reads."""
