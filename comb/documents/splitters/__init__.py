"""Splitters: a new one is a subclass of `Splitter` under its decorator, in a file of this folder."""
