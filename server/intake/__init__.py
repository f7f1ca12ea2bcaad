"""A request model becomes an admitted generation: prompts, answer form, parameters."""
