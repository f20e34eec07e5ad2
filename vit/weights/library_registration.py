"""Registers our additional networks with timm and transformers when these are imported.

`import vit` must not import them, and neither has a plug-in mechanism. An import hook therefore
registers our entry points right after the library is imported, or at once if it already is.
"""

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

# module of a library -> our module that registers networks with it on import
PLUGINS = {
    "timm": "vit.weights.formats.timm_conv_stem",
    "transformers.models.auto.modeling_auto": "vit.weights.formats.huggingface_classes",
}


class PluginFinder(MetaPathFinder):
    """Finds the modules of PLUGINS like all others, and imports the plug-in after each."""

    def __init__(self) -> None:
        self.pending = dict(PLUGINS)

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,  # noqa: ARG002
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        """The spec of a module in PLUGINS, which then imports our plug-in; None for all others."""
        plugin = self.pending.pop(fullname, None)  # avoids recursion in find_spec
        if plugin is None:
            return None
        try:
            spec = find_spec(fullname)
        finally:
            # kept: transformers only checks whether timm is installed, and loads it later or never
            self.pending[fullname] = plugin
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                import_plugin(plugin)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def import_plugin(plugin: str) -> None:
    """Import our plug-in; warn if the library's version is incompatible."""
    try:
        importlib.import_module(plugin)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        warnings.warn(f"{plugin} is not registered: {error}", stacklevel=2)


def register() -> None:
    """Register our networks with timm and transformers, now or when they are imported."""
    if any(isinstance(finder, PluginFinder) for finder in sys.meta_path):
        return
    finder = PluginFinder()
    sys.meta_path.insert(0, finder)
    for name in [name for name in PLUGINS if name in sys.modules]:
        import_plugin(finder.pending.pop(name))
