"""`pageserve ray`: replicas of the server on a Ray cluster. Ray places and routes; a replica is `pageserve serve`.

Only `deployments.py` and `request_router.py` import ray, only `ingress.py` imports aiohttp; both come with the extra
`[ray]`.
"""

from server.commands.ray.command import main

__all__ = ["main"]
