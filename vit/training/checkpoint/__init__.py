"""What a run writes to resume: checkpoints, best weights, the run folder."""
