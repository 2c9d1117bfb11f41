"""The model card of an adapter: what is known about it, how that is written, and how a person's edits stay."""
