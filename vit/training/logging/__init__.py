"""Events, log lines, progress and experiment trackers."""
