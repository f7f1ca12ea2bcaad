"""SamplingDefaults: how a model wants to be sampled, for what a request leaves open.

From the checkpoint's generation_config.json, as vLLM reads it: `do_sample` is not looked at, and the most new tokens
are the caller's business. A value that cannot be used is left out with a warning: the model runs as well without.
"""

import dataclasses
import logging
from pathlib import Path
from typing import Any

from engine.checkpoint.locate import read_json
from engine.errors import InvalidRequestError
from engine.sampling_params import SamplingParams, require_float

FILE = "generation_config.json"
MAX_TEMPERATURE = 2.0  # OpenAI's range, in which requests have to be, too
MAX_SHOWN = 40  # characters of a wrong value in a log

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Made without arguments: OpenAI's defaults."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def as_dict(self) -> dict[str, float]:
        return dataclasses.asdict(self)

    @property
    def changed(self) -> dict[str, float]:
        """Those that are not OpenAI's."""
        return {name: value for name, value in self.as_dict().items() if value != getattr(OPENAI, name)}


OPENAI = SamplingDefaults()


def read_sampling_defaults(model_dir: Path, source: str) -> SamplingDefaults:
    """Those of the model in `model_dir`, or OpenAI's. ModelError where the file is no JSON."""
    if source == "openai":
        return OPENAI
    values = read_json(model_dir / FILE)
    found = {name: _value(name, values[name]) for name in OPENAI.as_dict() if values.get(name) is not None}
    return SamplingDefaults(**{name: value for name, value in found.items() if value is not None})


def _value(name: str, value: Any) -> Any:
    """As SamplingParams has it; None for what cannot be used."""
    try:
        if name == "temperature":
            require_float(name, value, 0.0, MAX_TEMPERATURE)
        return getattr(SamplingParams(**{name: value}), name)
    except InvalidRequestError as error:
        logger.warning("%s: %s is left out: %s", FILE, repr(value)[:MAX_SHOWN], error)
        return None
