"""`python -m vit COMMAND` is `vit COMMAND`."""

import sys

from vit.commands.main import main

sys.exit(main())
