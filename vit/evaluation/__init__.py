"""How good answers are: metrics with intervals, and calibration."""
