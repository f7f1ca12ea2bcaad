"""PrefixRouter: Ray Serve's choice of a replica for each request."""

from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from server.commands.ray.prefixes import PrefixMemory, ranked


class PrefixRouter(RequestRouter):  # type: ignore[misc]  # mypy does not see ray
    """The replica that holds the longest prefix of the prompt, then the one with the fewest requests.

    A request carries the hashes of its prefixes and the addresses of replicas that failed it.
    """

    def initialize_state(self, **kwargs: Any) -> None:
        """Called by Ray Serve after construction."""
        self._memory = PrefixMemory()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._memory.keep_only(each.replica_id.unique_id for each in replicas)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Every candidate in a rank of its own, best first; no rank if all of them failed the request before."""
        hashes: list[int] = []
        failed: tuple[str, ...] = ()
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
            hashes = pending_request.kwargs.get("hashes", hashes)
            failed = pending_request.kwargs.get("failed", failed)
        candidates = [each for each in candidate_replicas if each.replica_metadata["address"] not in failed]
        if not candidates:
            return []
        held = [self._memory.held(hashes, each.replica_id.unique_id) for each in candidates]
        loads = [self.replica_queue_len_cache.get(each.replica_id) or 0 for each in candidates]
        order = ranked(held, loads)
        chosen = candidates[order[0]]
        self._memory.add(hashes, chosen.replica_id.unique_id)
        self.on_send_request(chosen.replica_id)  # until the replica tells its own number: requests come in bursts
        return [[candidates[i]] for i in order]
