"""`vit serve` whose page may be shown inside the page of its Space."""

from vit.commands.main import console
from vit.serving import application

application.PAGE_POLICY = application.PAGE_POLICY.replace(
    "frame-ancestors 'none'", "frame-ancestors https://huggingface.co"
)

if __name__ == "__main__":
    console("serve")
