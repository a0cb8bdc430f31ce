"""The configs of the model families, and their fields in Hugging Face's `config.json`."""
