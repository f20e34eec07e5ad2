"""`python -m vit COMMAND` is `vit COMMAND`."""

from vit.commands.main import console

console()
