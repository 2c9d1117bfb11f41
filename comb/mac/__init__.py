"""Match-Amend-Complete attention: decode steps that reuse what earlier, similar queries have already summed up."""

from comb.kernels.mac.mac_config import MacConfig
from comb.mac.session import MacSession, mac

__all__ = ["MacConfig", "MacSession", "mac"]
