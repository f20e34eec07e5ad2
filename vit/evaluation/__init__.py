"""Evaluation: metrics with intervals, calibration, reports and the cost of a model."""
