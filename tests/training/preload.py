"""What the fork server of `children.py` imports and compiles once, not each training anew."""

from PIL import Image

from vit.config.setting_layers import names_by_alias
from vit.evaluation import classification_page, html_page  # noqa: F401
from vit.inference import prediction_job  # noqa: F401

Image.preinit()
names_by_alias()
for template in html_page.TEMPLATES.glob("*.j2"):
    html_page._environment().get_template(template.name)
