"""Where pictures and the names of their classes come from, and how they are divided."""
