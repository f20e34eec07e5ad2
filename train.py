"""`python train.py DATA ...` is `vit train DATA ...`."""

from vit.commands.main import console

if __name__ == "__main__":
    console("train")
