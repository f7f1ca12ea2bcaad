"""SamplingDefaults: the model's sampling parameters, for fields that a request leaves out.

They come from the checkpoint's generation_config.json, which is read as in vLLM: `do_sample` is ignored. The limit of
new tokens is not part of them. An invalid value is skipped with a warning.
"""

import dataclasses
import logging
from functools import cached_property
from pathlib import Path
from typing import Any

from engine.checkpoint.json_files import read_json
from engine.errors import InvalidRequestError
from engine.sampling_params import SamplingParams, require_float

FILE = "generation_config.json"
MAX_TEMPERATURE = 2.0  # OpenAI's range, which also limits requests
MAX_SHOWN = 40  # characters of an invalid value in a log

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class SamplingDefaults:
    """The field defaults are OpenAI's."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def as_dict(self) -> dict[str, float]:
        return dataclasses.asdict(self)

    @cached_property  # every request asks
    def changed(self) -> dict[str, float]:
        """The values that differ from OpenAI's."""
        return {name: value for name, value in self.as_dict().items() if value != getattr(OPENAI, name)}


OPENAI = SamplingDefaults()


def read_sampling_defaults(model_dir: Path, source: str) -> SamplingDefaults:
    """The defaults of the model in `model_dir`, or OpenAI's if `source` is "openai". ModelError for invalid JSON."""
    if source == "openai":
        return OPENAI
    values = read_json(model_dir / FILE)
    found = {name: _value(name, values[name]) for name in OPENAI.as_dict() if values.get(name) is not None}
    return SamplingDefaults(**{name: value for name, value in found.items() if value is not None})


def _value(name: str, value: Any) -> Any:
    """The value as SamplingParams stores it; None, with a warning, if it is invalid."""
    try:
        if name == "temperature":
            require_float(name, value, 0.0, MAX_TEMPERATURE)
        return getattr(SamplingParams(**{name: value}), name)
    except InvalidRequestError as error:
        logger.warning("%s: %s is ignored: %s", FILE, repr(value)[:MAX_SHOWN], error)
        return None
