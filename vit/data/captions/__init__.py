"""Tokenizers of captions, and captions as token ids."""
