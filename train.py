"""`python train.py DATA ...` is `vit train DATA ...`."""

import sys

from vit.commands.main import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
