"""Tasks: what a network learns, with its loss, metrics, reports and answers."""
