"""What is wrong with a data set: found before time is spent on it."""
