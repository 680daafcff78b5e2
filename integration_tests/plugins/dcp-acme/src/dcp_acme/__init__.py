"""An example of a third-party package: found by its entry points, nobody has to import it."""

__all__ = ["__version__"]

__version__ = "0.1.0"
