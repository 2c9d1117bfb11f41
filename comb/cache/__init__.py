"""What compiling gives, and where it is kept.

In: a method's PICaches, each under a content key (`picache`). Out: references to them, which keep them on the device
(`store.PICacheStore.acquire`). Between lie one index without I/O (`index`, which the server's pool counts in as well),
device, host and disk `tiers`, and copies in eight or four bits (`quantization`).
"""
