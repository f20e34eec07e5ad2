"""Settings that are measured before a run: micro-batch size, loader processes, image cache."""
