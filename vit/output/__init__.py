"""Predictions on disk: JSON lines, CSV, vectors, sorted folders, all of them resumable."""
