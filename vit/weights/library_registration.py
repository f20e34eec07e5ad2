"""timm and transformers learn of the networks that only we can build, when they are imported.

`import vit` must stay light, and neither library looks for plug-ins by itself. So a finder waits
for the import of either, and lets our entry points be registered right after it; a library that is
there already is told at once.
"""

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

# a module of another library -> the module of ours whose import registers what it is to know
PLUGINS = {
    "timm": "vit.weights.formats.timm_conv_stem",
    "transformers.models.auto.modeling_auto": "vit.weights.formats.huggingface_classes",
}


class PluginLoader(Loader):
    """Loads a module as its own loader does, then imports our plug-in.

    Args:
        loader: Of the module.
        plugin: Name of ours.
    """

    def __init__(self, loader: Loader, plugin: str) -> None:
        self.loader = loader
        self.plugin = plugin

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As the module's own loader."""
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """As the module's own loader, and our plug-in afterwards."""
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self.loader  # resources are read through it
        self.loader.exec_module(module)
        load(self.plugin)


class PluginFinder(MetaPathFinder):
    """Finds the modules of PLUGINS as all other finders do, with `PluginLoader` as their loader."""

    def __init__(self) -> None:
        self.waiting = dict(PLUGINS)

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,  # noqa: ARG002
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        """None for every module that nobody waits for."""
        plugin = self.waiting.pop(fullname, None)  # or the search below would end here again
        if plugin is None:
            return None
        spec = find_spec(fullname)
        if spec is None or spec.loader is None:
            self.waiting[fullname] = plugin
            return None
        spec.loader = PluginLoader(spec.loader, plugin)
        return spec


def load(plugin: str) -> None:
    """Import our plug-in; a library of a version that it does not fit is still imported."""
    try:
        importlib.import_module(plugin)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        warnings.warn(f"{plugin} is not registered: {error}", stacklevel=2)


def register() -> None:
    """Let timm and transformers open our networks, now or as soon as they are imported."""
    if any(isinstance(finder, PluginFinder) for finder in sys.meta_path):
        return
    finder = PluginFinder()
    sys.meta_path.insert(0, finder)
    for name in [name for name in PLUGINS if name in sys.modules]:
        load(finder.waiting.pop(name))
