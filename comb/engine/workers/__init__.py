"""Segment parallelism: the cold documents of one request compiled by several workers at once (HYPIC sec. 4.4).

In go a method and segments, out come what ``method.compile`` gives for them, and where the time went. `executor` hands
segments out, collects, checks, and does again what is lost; `scheduling` says who compiles what and when a worker is
late; the workers are `ray_actors`, `worker` is what runs inside one.
"""

from comb.engine.workers.executor import Compiled, CompileExecutor, ExecutorStats
from comb.engine.workers.scheduling import Deadline

__all__ = ["CompileExecutor", "Compiled", "Deadline", "ExecutorStats"]
