"""Answers without torch: onnxruntime, numpy and Pillow, and how answers are written."""
