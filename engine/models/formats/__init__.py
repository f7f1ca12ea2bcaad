"""The formats of quantised checkpoints: one file each, which reads the settings and makes QuantizedWeights."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from engine.errors import ModelError
from engine.models.reader import ConfigReader, short
from engine.models.weight_format import WeightFormat

# quant_method in config.json -> the file of this folder whose read(ConfigReader) makes the WeightFormat. It is imported
# when a checkpoint asks for it: sizing a plain model must not wait for torch.
FORMATS: dict[str, str] = {
    "auto-round": "auto_round",
    "awq": "awq",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed_tensors",
    "fbgemm_fp8": "fp8",
    "fp8": "fp8",
    "gguf": "gguf",
    "gptq": "gptq",
    "intel/auto-round": "auto_round",
    "modelopt": "modelopt",
    "mxfp4": "mxfp4",
    "torchao": "torchao",
}


CONFIG_FIELD = "config.json: quantization_config"


def read_quantization(raw: Mapping[str, Any], where: str = CONFIG_FIELD) -> WeightFormat | None:
    """The format of the quantised weights by `quantization_config` of a parsed config.json; None for plain weights.

    ModelError names the field that is wrong or not served, and `where` the settings were read.
    """
    settings = raw.get("quantization_config")
    if settings is None:
        return None
    if not isinstance(settings, Mapping):
        raise ModelError(f"{where} must be an object, not {short(settings)}.")
    method = settings.get("quant_method")
    file = FORMATS.get(method) if isinstance(method, str) else None
    if file is None:
        raise ModelError(
            f"{where}: quant_method {short(method)} is not served; served are "
            f"{', '.join(FORMATS)}, or use a checkpoint in bf16, fp16 or fp32."
        )
    reader = ConfigReader(settings, where)
    weight_format: WeightFormat = import_module(f"engine.models.formats.{file}").read(reader)
    return weight_format
