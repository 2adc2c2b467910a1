"""The commands, one file each. Every file in this folder is imported, and registers its command."""

from importlib import import_module
from pkgutil import iter_modules

for module in iter_modules(__path__):
    import_module(f"{__name__}.{module.name}")
