"""Segment parallelism: the cold documents of one request compiled by several workers at once (HYPIC sec. 4.4).

`executor` hands segments out, collects, and does again what is lost; `ray_actors` are the workers and what they run.
"""

from comb.engine.workers.executor import Compiled, CompileExecutor, Deadline, ExecutorStats

__all__ = ["CompileExecutor", "Compiled", "Deadline", "ExecutorStats"]
