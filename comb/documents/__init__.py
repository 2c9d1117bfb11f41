"""What a user hands over: documents, prompts and examples, and how long documents are cut into segments.

Texts or token ids enter; `Document`, `Prompt` and `Example` leave, as token ids where a tokenizer is at hand
(`document.PromptBuilder`; chat `messages` too, through `rendering`). `catalog` has documents by id, `splitting` the
splitters, `found` finds segments that nobody has marked. `datasets` is the registry of readers, which other packages
fill, and counts what happens to rows.
"""
