"""Trained link tokens: learned vectors in front of every document while it is compiled, a small adapter.

`modeling` puts them on a backbone and trains them; `front` holds what is learned, behind whose keys and values method
``linktokens`` compiles documents.
"""
