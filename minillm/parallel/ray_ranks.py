"""Ranks that are Ray actors. Ray starts and ends them; plans go over our own connections, because a
call of an actor takes 3.7 ms and a socket 20 us. The driver hosts the store in which they meet.

Ray is trusted: it pickles, and runs what its users send it.
"""

import os
from typing import Any

from minillm.errors import NodeError, UnsupportedFeatureError, in_one_line
from minillm.parallel.launch import open_nodes
from minillm.parallel.meeting import Address
from minillm.parallel.messages import SetUp
from minillm.parallel.processes import RankProcesses

PATIENCE = 60.0  # seconds for the placement group


class RayRanks:
    """A placement group, and an actor in each of its bundles of one CPU, and one GPU if `on_gpus`.

    Raises:
        UnsupportedFeatureError: Ray is not installed.
        NodeError: the cluster has no room.
    """

    def __init__(self, size: int, address: Address, on_gpus: bool = False):
        self._ray = ray = import_ray()
        self._started = not ray.is_initialized()
        if self._started:
            ray.init(include_dashboard=False, log_to_driver=False, configure_logging=False)
        self._group: Any = None
        self._each = {"CPU": 1} | ({"GPU": 1} if on_gpus else {})
        self._actors: list[Any] = []
        try:
            self._place(size)
            self._start(size, address)
        except BaseException:
            self.close()
            raise

    def _place(self, size: int) -> None:
        ray = self._ray
        from ray.util.placement_group import placement_group

        self._group = placement_group([self._each] * size, strategy="PACK")
        try:
            ray.get(self._group.ready(), timeout=PATIENCE)
        except ray.exceptions.GetTimeoutError:
            free = ray.available_resources().get("CPU", 0)
            raise NodeError(
                f"Ray found no room for {size} ranks of one {' and one '.join(self._each)} each in "
                f"{PATIENCE:g} s: "
                f"{ray.cluster_resources().get('CPU', 0):g} CPUs are in the cluster, {free:g} are "
                "free; add nodes, or use fewer ranks."
            ) from None

    def _start(self, size: int, address: Address) -> None:
        ray = self._ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        options = {"num_cpus": 1, "num_gpus": self._each.get("GPU", 0)}
        actor = ray.remote(max_restarts=0, max_task_retries=0, **options)(RayRank)
        for rank in range(size):
            place = PlacementGroupSchedulingStrategy(self._group, rank)
            self._actors.append(actor.options(scheduling_strategy=place).remote())
        calls = [started.serve.remote(address, rank) for rank, started in enumerate(self._actors)]
        self._calls = calls

    def look(self) -> None:
        """NodeError if an actor has ended before it connected."""
        done, _ = self._ray.wait(self._calls, num_returns=len(self._calls), timeout=0)
        for call in done:
            rank = self._calls.index(call)
            try:
                self._ray.get(call)
            except Exception as error:
                cause = getattr(error, "cause", None) or error
                raise NodeError(
                    f"Rank {rank} of {len(self._calls)} did not start in Ray: {in_one_line(cause)}"
                ) from None

    def close(self) -> None:
        """End the actors, remove the placement group, and stop Ray if this object has started it.
        Idempotent."""
        ray, actors, group = self._ray, self._actors, self._group
        self._actors, self._group = [], None
        if not ray.is_initialized():
            return
        for actor in actors:
            ray.kill(actor, no_restart=True)
        if group is not None:
            from ray.util import remove_placement_group

            remove_placement_group(group)
        if self._started:
            ray.shutdown()


class RayRank:
    """The actor."""

    def serve(self, address: Address, rank: int) -> None:
        """Serve the driver until it closes."""
        from minillm.parallel.worker import serve_rank

        os.environ["LOCAL_RANK"] = "0"  # of several GPUs, Ray shows an actor its own
        serve_rank(address, rank)


def import_ray() -> Any:
    """Ray, without its usage reports."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError:
        raise UnsupportedFeatureError(
            "distributed_executor_backend='ray' needs Ray, which is not installed; "
            "`pip install 'minillm-course[ray]'` installs it."
        ) from None
    return ray


def open_ray(set_up: SetUp) -> RankProcesses:
    """Ranks that Ray starts, on the cluster that it knows, or on this machine alone."""
    args = set_up.args
    address, store = Address(args.master_addr, args.master_port, "minillm").open(hosts=True)
    actors = RayRanks(args.num_ranks, address, set_up.device != "cpu")
    try:
        return open_nodes(set_up, address, store, look=actors.look, release=actors.close)
    except BaseException:
        actors.close()
        raise
