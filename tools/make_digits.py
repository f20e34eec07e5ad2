"""Write vit/data/sources/digits.png and digits.json from scikit-learn's digits: run it as it is."""

import json
from pathlib import Path

import numpy as np
from einops import rearrange
from PIL import Image
from sklearn.datasets import load_digits

COLUMNS = 43


def main() -> None:
    """Lay the digits out row by row on one sheet."""
    digits = load_digits()
    rows = -(-len(digits.images) // COLUMNS)
    cells = np.zeros((rows * COLUMNS, 8, 8))
    cells[: len(digits.images)] = digits.images
    sheet = rearrange(
        np.rint(cells * 255 / 16).astype(np.uint8),
        "(rows cols) height width -> (rows height) (cols width)",
        cols=COLUMNS,
    )
    folder = Path(__file__).parent.parent / "vit" / "data" / "sources"
    Image.fromarray(sheet).save(folder / "digits.png", optimize=True)
    labels = json.dumps(digits.target.tolist(), separators=(",", ":"))
    (folder / "digits.json").write_text(labels + "\n", encoding="ascii")


if __name__ == "__main__":
    main()
