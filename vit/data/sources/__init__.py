"""Where images and the names of their classes come from, and how they are divided."""
