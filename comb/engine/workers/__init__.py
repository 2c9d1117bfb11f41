"""Segment parallelism: the cold documents of one request compiled by several workers at once (HYPIC sec. 4.4).

In go a method and segments, out come what ``method.compile`` gives for them, and where the time went. `executor` hands
segments out, collects, and does again what is lost; `request` says who compiles what, when a worker is late and what of
its answers can be used; `ray_actors` are the workers, and what runs inside one.
"""

from comb.engine.workers.executor import Compiled, CompileExecutor, ExecutorStats
from comb.engine.workers.request import Deadline

__all__ = ["CompileExecutor", "Compiled", "Deadline", "ExecutorStats"]
