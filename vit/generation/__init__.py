"""Sentences from a decoder: the likeliest word, beam search, sampling."""
