"""Names for files that are no pictures but are called so."""

import re

# What is often found under a picture's name: pattern of the first bytes, what to call it.
STRANGERS = (
    (rb"\A....ftyp(hei|hev|mif1|msf1)", "a HEIC picture: convert it to JPEG or PNG"),
    (rb"\A....ftypavi", "a damaged AVIF picture, or AVIF is missing in this Pillow"),
    (rb"\A....ftyp", "a video"),
    (rb"\A(\xff\x0a|\0\0\0\x0cJXL )", "a JPEG XL picture: convert it to JPEG or PNG"),
    (rb"\A\s*<(!doctype html|html|head)", "a web page, maybe a failed download"),
    (rb"\A\s*<(\?xml|svg)", "XML or SVG: convert it to PNG"),
    (rb"\Aversion https://git-lfs", "a Git LFS pointer: run `git lfs pull`"),
    (rb"\A%PDF", "a PDF document"),
    (rb"\APK\x03\x04", "a ZIP archive: unpack it"),
    (rb"\A\s*\{", "JSON, maybe a failed download"),
    (rb"\A(\xff\xd8\xff|\x89PNG|GIF8|RIFF|BM|II\*|MM\0\*)", "damaged from its first bytes on"),
    (rb"\A[\t\n\r -~]*\Z", "text"),
)


def guessed(start: bytes) -> str:
    """What a file is that no parser of pictures knows, from its first bytes."""
    names = (name for pattern, name in STRANGERS if re.match(pattern, start, re.I | re.S))
    return next(names, "unknown content")
