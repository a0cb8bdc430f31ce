"""The `config.json` of Hugging Face: its fields, their bounds, and rotary positions in it."""
