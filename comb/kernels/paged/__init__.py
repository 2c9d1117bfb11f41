"""Attention to documents in blocks of a shared pool, as the server's cross blocks read them: where they lie and the
plain `attention`, the `kernel`, and the `plan` of who does what of a step's work.
"""
