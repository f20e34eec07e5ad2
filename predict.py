"""`python predict.py MODEL INPUT ...` is `vit predict MODEL INPUT ...`."""

import sys

from vit.commands.main import main

if __name__ == "__main__":
    sys.exit(main(["predict", *sys.argv[1:]]))
