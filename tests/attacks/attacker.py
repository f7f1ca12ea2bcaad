"""The process of one attack: `python -m tests.attacks.attacker NAME SECONDS TARGET`, TARGET being a Target in JSON.

It has less of the processor than server and probes where they want the same core: an attacker has a machine of its own,
and a client that burns a core must not pass for a server that is silent. Prints what went wrong, if anything did.
"""

import asyncio
import json
import os
import sys
import traceback

from tests.attacks.frame import Target, load_attacks

NICENESS = 10


async def run(name: str, seconds: float, target: Target) -> str | None:
    try:
        return await asyncio.wait_for(load_attacks()[name].function(target), seconds)
    except asyncio.TimeoutError:
        return None  # it went on until the end


def main() -> None:
    name, seconds, target = sys.argv[1:]
    os.nice(NICENESS)
    try:
        fault = asyncio.run(run(name, float(seconds), Target(**json.loads(target))))
    except Exception:
        fault = "the attack itself failed: " + traceback.format_exc()
    if fault:
        print(fault)


if __name__ == "__main__":
    main()
