"""Where jobs run, as a table: a further executor is one file and one line here."""

from leakscope.audit.executors.base import Executor, ExecutorError, Serial
from leakscope.audit.executors.processes import Processes
from leakscope.audit.executors.ray import RayCluster
from leakscope.contracts.registry import Entry, Registry

EXECUTORS: Registry[Entry] = Registry(
    "executor",
    (
        Entry("serial", Serial, "in this process, one job after another"),
        Entry("processes", Processes, "in worker processes, which may die without harm to others"),
        Entry("ray", RayCluster, "on a Ray cluster of one machine or many, whose nodes may be lost without harm"),
    ),
    Executor,
)

__all__ = ["EXECUTORS", "Executor", "ExecutorError"]
