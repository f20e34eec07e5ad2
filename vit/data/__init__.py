"""Pixels to batches: sources, decoding, transforms, mixing, loading."""
