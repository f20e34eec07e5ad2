"""A saved model and pictures in, answers out."""
