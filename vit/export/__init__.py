"""Exporters: a trained network as a file for other engines, and verification of its outputs."""
