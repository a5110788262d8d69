"""Calibration: observers, activation ranges and the choice among calibration tables."""
