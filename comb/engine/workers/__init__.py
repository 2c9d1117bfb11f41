"""Segment parallelism: the cold documents of one request compiled by several workers at once (HYPIC sec. 4.4).

`executor` hands segments out to Ray actors, collects, and does again what is lost; `actor` is what runs in each.
"""

from comb.engine.workers.executor import Compiled, CompileExecutor, ExecutorStats

__all__ = ["CompileExecutor", "Compiled", "ExecutorStats"]
