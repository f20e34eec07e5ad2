"""A saved model and images in, answers out."""
