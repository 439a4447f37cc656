"""The one place that names kvpage's version."""

__version__ = "0.1.0"
