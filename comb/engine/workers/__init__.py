"""Segment parallelism: the cold documents of one request compiled by several workers at once (HYPIC sec. 4.4).

`executor` is the interface, `scheduling` says who compiles what, `run` takes one request through: hands segments out,
collects, checks, and replaces what is lost. `pool` is what it needs of workers, `processes` and `ray_actors` are the
two kinds of them, `worker` is what runs inside one, `wire` how a process is talked to, `source` where a worker loads
its model from, `simulate` what other numbers of workers would do.
"""

from comb.engine.workers.executor import Compiled, CompileExecutor, ExecutorStats
from comb.engine.workers.scheduling import Deadline
from comb.model.source import ModelSource

__all__ = ["CompileExecutor", "Compiled", "Deadline", "ExecutorStats", "ModelSource"]
