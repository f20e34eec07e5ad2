"""Trained networks as files that run without torch, and the proof that they are the same."""
