"""Splitters, a file each: a new one is one more file here, with a subclass of `Splitter` under its decorator."""
