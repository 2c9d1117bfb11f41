"""What compiling gives, and where it is kept.

In: a method's PICaches, each under a content key (`picache`). Out: references to them, which keep them on the device
(`store.PICacheStore.acquire`). Between lie one index without I/O (`index`, which the server's pool counts in as well),
device, host and disk tiers (`tiers`), a folder of files (`disk`, in the format of `picache_file`), and eight-bit copies
(`quantization`). Others use `PICacheStore`, the kinds of `PICache`, `content_key` and, in the server, `CacheIndex`.
"""
