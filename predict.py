"""`python predict.py MODEL INPUT ...` is `vit predict MODEL INPUT ...`."""

from vit.commands.main import console

if __name__ == "__main__":
    console("predict")
