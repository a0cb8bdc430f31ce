"""Hugging Face folders: fields of `config.json`, names of weights, and the files of both.

No family is known here.

Only in flax_attn: PyTorch has transformers.
"""
