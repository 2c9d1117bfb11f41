"""What a user hands over: documents, prompts and examples, and how long documents are cut into segments.

Texts or token ids enter; `Document`, `Prompt` and `Example` leave, as token ids where a tokenizer is at hand
(`document.PromptBuilder`, chat `messages` too). `splitting` cuts at the boundaries of a splitter (`splitters`).
`datasets` is the registry of readers, which other packages fill, and counts what happens to rows.
"""
