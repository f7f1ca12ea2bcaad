"""Proposes drafts with a small model, and finds how many tokens of a draft are right."""

from engine.worker.speculation.draft_model import DraftModel, NoDraftModel
from engine.worker.speculation.draft_passes import HostPasses
from engine.worker.speculation.draft_rounds import DraftRounds
from engine.worker.speculation.queued_passes import QueuedPasses

__all__ = ["DraftModel", "DraftRounds", "HostPasses", "NoDraftModel", "QueuedPasses"]
