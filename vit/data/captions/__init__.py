"""Captions of images: lists of them, and their words as numbers."""
