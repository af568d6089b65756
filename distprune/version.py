"""Which version of the library is installed."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__: str | None = version("distprune")
except PackageNotFoundError:  # run from its sources, not installed
    __version__ = None
