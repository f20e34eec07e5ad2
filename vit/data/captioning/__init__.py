"""Captions of pictures: lists of them, and their words as numbers."""
