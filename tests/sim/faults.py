"""The faults that `make sim-mutants` plants: none that is equivalent to the original for every observer."""

import engine.executor.supervisor
import engine.memory.block_manager
import engine.requests.loaded
import engine.scheduling.scheduler
from engine.driver import Driver
from engine.executor.executor import Executor
from engine.executor.process_state import StoppedLooks
from engine.executor.step_durations import StepDurations
from engine.executor.step_watch import StepWatch
from engine.executor.supervisor import Supervisor
from engine.memory.block_manager import BlockManager
from engine.memory.free_list import FreeList
from engine.memory.host_tier import HostTier
from engine.memory.sequence import Sequence
from engine.requests.adapters import Adapters
from engine.requests.delivery import Delivery
from engine.requests.live_requests import LiveRequests
from engine.requests.loaded import Loaded
from engine.scheduling.admission import Admission
from engine.scheduling.beam_group import BeamGroup
from engine.scheduling.beam_search import BeamSearch
from engine.scheduling.block_reserve import PredictedReserve, WatermarkReserve
from engine.scheduling.fair_share import FairShare
from engine.scheduling.output_lengths import OutputLengths
from engine.scheduling.plan_parts import RunningParts
from engine.scheduling.prefetch import Prefetcher
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.short_steps import ShortSteps
from engine.scheduling.speculation.drafts import NgramDrafts
from engine.worker.cache.disk_cache import BlockFile
from engine.worker.cache.host_cache import HostCache
from tests.sim.mutants import Mutant

MUTANTS = (
    # Reference counts and the free list.
    Mutant("lost decref of a shared block", BlockManager, "free", "ref_count -= 1", "ref_count -= block.ref_count < 2"),
    Mutant("shared block freed too early", BlockManager, "free", "if block.ref_count:", "if block.ref_count > 1:"),
    Mutant("block table kept after free", BlockManager, "free", "seq.block_table = []", "pass"),
    Mutant("ref count not raised on a hit", BlockManager, "adopt_prefix", "ref_count += 1", "ref_count |= 1"),
    Mutant("hit stays in the free list", BlockManager, "adopt_prefix", "self.free_blocks.remove(block)", "pass"),
    Mutant(
        "removal from the middle breaks the list", FreeList, "remove", "= following, prev", "= following, self._end"
    ),
    Mutant("one block too few", BlockManager, "allocate", "+ num_tokens)", "+ num_tokens - 1)"),
    Mutant("hits are not counted as taken", BlockManager, "can_admit", "block.ref_count == 0", "False"),
    # Copy-on-write.
    Mutant("missed copy", BlockManager, "allocate", "last is not None and last.ref_count > 1", "False"),
    Mutant("copy missed with two holders", BlockManager, "allocate", "ref_count > 1", "ref_count > 2"),
    Mutant("copied block keeps its count", BlockManager, "_replace_last", "last.ref_count -= 1", "pass"),
    Mutant("copy does not enter the table", BlockManager, "_replace_last", "seq.block_table[-1] = target", "pass"),
    Mutant("no room for a copy", BlockManager, "allocate", "num_new + shared >", "num_new >"),
    Mutant("Worker not told of a copy", Scheduler, "_plan_chunk", "if blocks.copy is not None:", "if False:"),
    Mutant("fork does not count as a holder", BlockManager, "fork", "ref_count += 1", "ref_count += 0"),
    Mutant("fork shares the table itself", BlockManager, "fork", "list(parent.block_table)", "parent.block_table"),
    Mutant(
        "forks lost when the first ends", Scheduler, "finish", "if forks := self._forks.pop(seq, None):", "if False:"
    ),
    Mutant("fork's token not on its way", Scheduler, "_start_fork", "fork.num_pending_tokens += 1", "pass"),
    Mutant(
        "fork starts where no row is free", Admission, "has_free_row", "< self.max_num_seqs", "<= self.max_num_seqs"
    ),
    # The prefix cache.
    Mutant("stale hash of a block given out again", BlockManager, "_evict", "self._forget(block)", "pass"),
    Mutant(
        "block forgets its hash, the index does not",
        BlockManager,
        "_forget",
        "del self.cached_blocks[block.key]",
        "pass",
    ),
    Mutant("stale tail of a block given out again", BlockManager, "_take_free", "self._forget_tail(block)", "pass"),
    Mutant(
        "part of a block whose tokens differ", engine.memory.block_manager, "_num_common", "pair[0] == pair[1]", "True"
    ),
    Mutant("full block written over", BlockManager, "allocate", "(shared or last.key is not None)", "shared"),
    Mutant("full block taken over, still cached", BlockManager, "allocate", "self._evict(last, last.key)", "pass"),
    Mutant("full block lost with its copy", BlockManager, "_replace_last", "self.free_blocks.append(last)", "pass"),
    Mutant(
        "block copied before it is computed",
        BlockManager,
        "_remember",
        "self._registered.append(block)",
        "self.followers[parent] = block",
    ),
    Mutant("evicted block still copied", BlockManager, "_forget", "del self.followers[block.parent]", "pass"),
    Mutant(
        "last token's block adopted", BlockManager, "match_prefix", "seq.num_skippable_tokens", "len(seq.token_ids)"
    ),
    Mutant("match goes on after a miss", BlockManager, "match_prefix", "break", "continue"),
    Mutant("salt ignored", BlockManager, "_root", "seq.cache_salt.encode()", "b''"),
    Mutant("adapter ignored", BlockManager, "_root", "fields.append(seq.adapter.version)", "pass"),
    Mutant("parent ignored", BlockManager, "_extend_keys", "sha256(parent + packed)", "sha256(packed)"),
    Mutant("one token of a block not hashed", BlockManager, "_extend_keys", "*token_ids)", "0, *token_ids[1:])"),
    Mutant(
        "block cached before it is full",
        BlockManager,
        "register_full_blocks",
        "min(seq.num_computed_tokens, len(seq.token_ids))",
        "min(len(seq.token_ids), len(seq.block_table) * self.block_size)",
    ),
    Mutant("failed blocks stay in the cache", BlockManager, "free", "if discard:", "if False:"),
    Mutant(
        "computed off by one after preemption",
        BlockManager,
        "adopt_prefix",
        "* self.block_size",
        "* self.block_size + (seq.num_preemptions > 0)",
    ),
    # The host tier.
    Mutant("load not told to the Worker", HostTier, "load", "self._loads[block_id] = self._slots[key]", "pass"),
    Mutant("slot written over before it is read", HostTier, "_evict", "if slot not in self._pinned:", "if True:"),
    Mutant(
        "first of two offloads to a slot wins",
        HostTier,
        "offload",
        "self._offloads[slot] = ",
        "self._offloads[slot] = self._offloads.get(slot) or ",
    ),
    Mutant("slot lost with a failed block", HostTier, "discard", "self._free.append(slot)", "pass"),
    Mutant("failed blocks stay on the host", BlockManager, "_forget_everywhere", "self.host_tier.discard(", "bool("),
    # The scheduler.
    Mutant(
        "abort leaks the blocks",
        Scheduler,
        "finish",
        "self.block_manager.free(",
        "reason is FinishReason.ABORT or self.block_manager.free(",
    ),
    Mutant("Worker not told of a preemption", Scheduler, "_preempt", "self._drop_row(seq)", "pass"),
    Mutant("Worker not told of an end", Scheduler, "finish", "self._drop_row(seq)", "pass"),
    Mutant(
        "preempted sequence goes to the back",
        Scheduler,
        "_preempt",
        "self.waiting.add(seq)",
        "self.waiting.append(seq)",
    ),
    Mutant("first in order is preempted", Admission, "victim_for", "candidates[-1]", "self._running[0]"),
    Mutant("victim stays in the plan", Scheduler, "_allocate_or_preempt", "parts.drop(victim)", "pass"),
    Mutant("admitted with a token on its way", Admission, "next_start", "if seq.num_pending_tokens or", "if"),
    Mutant("budget not used up by admissions", Scheduler, "schedule", "budget -= self._start", "self._start"),
    Mutant("one sequence too many", Admission, "_has_row", "<= self.max_num_seqs", "<= self.max_num_seqs + 1"),
    Mutant(
        "late token of a finished sequence taken",
        Scheduler,
        "finish",
        "del self._sequences[seq.seq_id]",
        "reason is FinishReason.STOP or self._sequences.pop(seq.seq_id)",
    ),
    Mutant(
        "token stays on its way for ever",
        Scheduler,
        "update",
        "seq.num_pending_tokens -= 1",
        "seq.num_pending_tokens -= seq.num_preemptions == 0",
    ),
    Mutant(
        "min_tokens off by one", engine.scheduling.scheduler, "end_after", ">= params.min_tokens", "> params.min_tokens"
    ),
    Mutant(
        "one token past max_tokens",
        engine.scheduling.scheduler,
        "end_after",
        "len(seq.token_ids) >=",
        "len(seq.token_ids) >",
    ),
    # The Driver.
    Mutant("owner of an aborted sample kept", LiveRequests, "_end_early", "self._owners.pop(", "self._owners.get("),
    Mutant("nobody plans after an arrival", LiveRequests, "register", "self._wake()", "pass"),
    Mutant(
        "stop string's blocks not freed",
        Delivery,
        "_deliver_token",
        "self._scheduler.finish(seq, FinishReason.STOP, stop)",
        "pass",
    ),
    Mutant("failure of a request not told", LiveRequests, "fail", "live.stream.fail(error)", "pass"),
    Mutant("deadline outlives its request", LiveRequests, "_forget", "self._deadlines.clear(request_id)", "pass"),
    Mutant(
        "request outlives its deadline", LiveRequests, "_expire", "self._end_early(live, FinishReason.ABORT)", "pass"
    ),
    Mutant(
        "host tier outlives the sleep of another Worker",
        Driver,
        "_rest",
        "keep_host_tier=executor is self.supervisor.executor",
        "keep_host_tier=True",
        for_driver=True,
    ),
    # Adapters.
    Mutant("more adapters than slots", Admission, "_has_slot", "< self.max_loras", "<= self.max_loras"),
    Mutant(
        "sequences give way for nothing",
        Admission,
        "next_newcomer",
        "or not self._has_slot(seq, displacement.victims)",
        "",
    ),
    Mutant(
        "adapter dropped amid its requests",
        Adapters,
        "_forget_unused",
        "and not entry.num_live",
        "and entry.adapter_id in self._by_id",
        for_driver=True,
    ),
    Mutant("adapters not loaded again", Adapters, "detach", "self._send = None", "pass", for_driver=True),
    Mutant("adapter left in the Worker", Adapters, "_forget", "self._send(UnloadAdapter(", "bool((", for_driver=True),
    Mutant("load outlives the engine", Adapters, "fail_all", "_settle(entry, error)", "pass", for_driver=True),
    # The restart of a Worker.
    Mutant("lost token still on its way", Sequence, "lose_blocks", "self.num_pending_tokens = ", ""),
    Mutant("fork waits by itself and for its parent", Scheduler, "reset", "if seq.fork_of is None", ""),
    Mutant(
        "host tier outlives its Worker",
        BlockManager,
        "reset",
        "self.host_tier = host_tier",
        "self.host_tier = host_tier if self.host_tier is None else self.host_tier",
    ),
    Mutant("plans of the dead Worker awaited", Driver, "_blame", "self._in_flight.clear()", "pass"),
    Mutant(
        "a kill from outside is held against requests",
        Supervisor,
        "record_death",
        "[] if from_outside else request_ids",
        "request_ids",
    ),
    # Another pool after the restart.
    Mutant(
        "request too large for the new pool goes on",
        engine.requests.loaded,
        "fits_still",
        "if seq.max_num_tokens - (not seq.params.generates) <= limit:",
        "if True:",
        for_driver=True,
    ),
    Mutant(
        "request not cut to the new pool",
        engine.requests.loaded,
        "cut_to_context",
        "seq.max_num_tokens = min(seq.max_num_tokens, model.max_model_len)",
        "pass",
        for_driver=True,
    ),
    Mutant(
        "context of the old pool", Loaded, "on", "replace(self, model=self.model.on(ready))", "self", for_driver=True
    ),
    Mutant(
        "watermark of the old pool",
        WatermarkReserve,
        "reset",
        "self.watermark_blocks = watermark_blocks",
        "pass",
        for_driver=True,
    ),
    # Beam searches.
    Mutant("hypothesis not sent anew", Scheduler, "_apply", "self.resend(seq)", "pass"),
    Mutant("dead hypothesis keeps its blocks", BeamGroup, "_go_on", "if number not in firsts", "if False"),
    Mutant("hypotheses share a list of tokens", Scheduler, "_apply", "list(parent.token_ids)", "parent.token_ids"),
    Mutant("group chooses before all are back", BeamGroup, "add_candidates", "not all(", "not any("),
    Mutant("late end counts as finished", BeamSearch, "advance", "elif rank < width:", "else:"),
    Mutant(
        "suspect that never fits keeps the others out",
        Driver,
        "_pump",
        "not live.end_searches(now) and",
        "(live.end_searches(now) or True) and",
        for_driver=True,
    ),
    # Admission by prediction.
    Mutant("who stopped is still counted", PredictedReserve, "stopped", "self.holders.pop(seq)", "self.holders[seq]"),
    Mutant("forecast keeps who stopped", PredictedReserve, "stopped", "if holder.num_seqs:", "if False:"),
    Mutant(
        "prediction beats the watermark", PredictedReserve, "spare", "max(self.watermark(num_forks), growth)", "growth"
    ),
    Mutant(
        "hypothesis counted by its next token",
        OutputLengths,
        "class_of",
        "seq.group.max_new_tokens is not None",
        "False",
    ),
    # Fair sharing.
    Mutant("the end of a sequence not told", FairShare, "went", "tenant.num_live -= 1", "pass"),
    Mutant(
        "newcomer pushes out the first in order",
        FairShare,
        "displacement_for",
        "self._share(largest, holdings[largest]) < asked",
        "False",
    ),
    Mutant("what cannot be divided never gives way", FairShare, "displacement_for", "2 * asked > held", "True"),
    Mutant(
        "gives way again before it got further",
        FairShare,
        "displacement_for",
        "not self.comebacks.keys().isdisjoint(part)",
        "False",
    ),
    Mutant(
        "search gives way but for its spare rows",
        FairShare,
        "displacement_for",
        "(part[0].group.num_spare_rows if part[0].group is not None else 0)",
        "0",
    ),
    Mutant("the other samples count as one part", Scheduler, "_displace", "victim.group.split = True", "pass"),
    Mutant("who gave way is next at once", FairShare, "next_in_turn", "seq.tenant in displaced, ", ""),
    Mutant(
        "turns of a tenant in no order",
        FairShare,
        "next_in_turn",
        "heads.setdefault(seq.tenant, seq)",
        "heads[seq.tenant] = seq",
    ),
    Mutant(
        "all make way, and nobody is let in",
        Scheduler,
        "_wider_scope",
        " and self.num_preemptions == num_preemptions",
        "",
    ),
    Mutant("those served more leave for good", FairShare, "_scope", "if not due:", "if not running:"),
    Mutant("those who rest take no turns", ShortSteps, "_resting", "rows.sort(key=lambda seq: seq.last_turn)", "pass"),
    # Speculation.
    Mutant("right draft not counted as computed", Scheduler, "_add_verified", "seq.num_computed_tokens += 1", "pass"),
    Mutant("wrong draft counted as computed", Scheduler, "_add_verified", "and i > 0", ""),
    Mutant("blocks of a wrong draft kept", Scheduler, "_add_verified", "self.block_manager.trim(seq)", "pass"),
    Mutant("preempted draft still waited for", Scheduler, "_preempt", "seq.num_draft_tokens = 0", "pass"),
    Mutant("verified draft still waited for", Scheduler, "_add_verified", "seq.num_draft_tokens = 0", "pass"),
    Mutant(
        "lost draft still waited for", Sequence, "lose_blocks", "= self.num_draft_tokens = 0", "= 0", for_driver=True
    ),
    Mutant("draft past the last token", NgramDrafts, "_room", "seq.num_tokens - 1", "seq.num_tokens + 1"),
    Mutant("tokens behind the end go out", Scheduler, "_add_verified", "del tokens[i + 1 :]", "pass", for_driver=True),
    Mutant(
        "tokens behind a stop string stay",
        Delivery,
        "_deliver_several",
        "del seq.token_ids[number - len(tokens) :]",
        "pass",
        for_driver=True,
    ),
    Mutant("ended sequence still has drafts", NgramDrafts, "forget", "self._candidates.discard(seq)", "pass"),
    Mutant("next token planned beside a draft", RunningParts, "commit_decodes", "seq.decode_end = 0", "pass"),
    Mutant("blocks of a draft not told", RunningParts, "add_draft", "+ blocks.new_block_ids", ""),
    # The disk tier.
    Mutant(
        "damaged block served", BlockFile, "load", " and checksum == _checksum(digest, content)", "", for_driver=True
    ),
    Mutant(
        "file outgrows its quota",
        BlockFile,
        "__init__",
        "max(0, quota - DATA_START)",
        "(quota + 4096)",
        for_driver=True,
    ),
    Mutant(
        "broken disk keeps a Worker from starting", BlockFile, "_begins_with", "OSError", "KeyError", for_driver=True
    ),
    Mutant(
        "block kept from a slot given to a fetch",
        HostCache,
        "fetch",
        "self._digests.pop(slot, None)",
        "pass",
        for_driver=True,
    ),
    Mutant("flush drops what is too much", HostCache, "keep", "must=flush", "must=False", for_driver=True),
    Mutant(
        "unread blocks count as fetched",
        Prefetcher,
        "fetched",
        "fetch.keys[: message.num_blocks]",
        "fetch.keys",
        for_driver=True,
    ),
    Mutant(
        "endless wait for the disk",
        Prefetcher,
        "fetch_for",
        "later(FETCH_SECONDS",
        "later(60 * FETCH_SECONDS",
        for_driver=True,
    ),
    Mutant(
        "slot of a fetch given out again",
        HostTier,
        "reserve",
        "self._reserved.update(slots)",
        "self._free.extend(slots)",
        for_driver=True,
    ),
    # The watch.
    Mutant("hang never noticed", StepWatch, "tick", "self.silence > self._limit", "False", for_driver=True),
    Mutant("results do not calm the watch", StepWatch, "received", "self._calm()", "pass", for_driver=True),
    Mutant("steps of a new kind get no time", StepWatch, "sent", "self._num_new_steps == 0", "True", for_driver=True),
    Mutant("nothing is learned of steps", StepDurations, "limit", "if slowest is None", "if True", for_driver=True),
    Mutant(
        "hang excused by a slow kind", StepDurations, "add", "kind = kind_of(plan)", "kind = 0, 0, 0", for_driver=True
    ),
    Mutant("results not told to the watch", Executor, "receive", "self.watch.received()", "pass", for_driver=True),
    Mutant("no heartbeats", Executor, "_tick", "if self.watch.heartbeat_due:", "if False:", for_driver=True),
    Mutant(
        "answers do not calm the watch",
        StepWatch,
        "received_heartbeat",
        "self._awaits_heartbeat = False",
        "pass",
        for_driver=True,
    ),
    Mutant(
        "answers count as steps",
        StepWatch,
        "received_heartbeat",
        "self._calm()",
        "self._silent_ticks, self._num_results = 0, self._num_results + 1",
        for_driver=True,
    ),
    Mutant("stopped Worker never noticed", Executor, "_kill_when_stopped", "self._kill()", "pass", for_driver=True),
    Mutant("no time to go on", StoppedLooks, "look", ">= STOPPED_LOOKS", ">= 2", for_driver=True),
    Mutant(
        "heartbeat waited for as long as a step",
        StepWatch,
        "__init__",
        "min(timeout, self.HEARTBEAT_SECONDS)",
        "timeout",
        for_driver=True,
    ),
    Mutant(
        "hang never held against a request",
        Executor,
        "_give_up",
        "from_outside=held or idle",
        "from_outside=True",
        for_driver=True,
    ),
    Mutant(
        "stop held against requests",
        Executor,
        "_kill_when_stopped",
        "from_outside=True",
        "from_outside=False",
        for_driver=True,
    ),
    # The end of the server.
    Mutant(
        "cancellation lost in a restart",
        engine.executor.supervisor,
        "with_timeout",
        "        await asyncio.wait([task], timeout=seconds)\n",
        "        try:\n"
        "            await asyncio.wait([task], timeout=seconds)\n"
        "        except asyncio.CancelledError:\n"
        "            if not task.done():\n"
        "                raise\n",
        for_driver=True,
    ),
    Mutant(
        "requests forgotten at the end",
        Driver,
        "stop",
        'self._fail_all(EngineError("The engine was stopped."))',
        "pass",
        for_driver=True,
    ),
    Mutant("Worker left at the end", Driver, "stop", "await self.supervisor.executor.stop()", "pass", for_driver=True),
)
