"""Readers of datasets, those alike in one file: a function from a `DatasetSide` to examples under ``@reader("name")``.

They are found by walking this folder at the first lookup, so a module here imports nothing heavy.
"""
