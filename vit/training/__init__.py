"""How we learn: the loop, optimisation, schedule, losses, moving average, checkpoints."""
