"""Devices, processes and their communication."""
