"""An example of a third-party package: found by its entry point, without an import."""

__all__ = ["__version__"]

__version__ = "0.1.0"
