"""`pageserve generate`: complete prompts offline with engine.llm.LLM, without a server."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.command_line import Parser
from engine.config import EngineConfig
from engine.errors import ConfigError, InvalidRequestError
from engine.outputs import RequestOutput
from engine.sampling_params import SamplingParams
from engine.settings import add_flags, load_settings
from engine.text.unicode import is_valid_unicode
from server.config import ServerConfig

SAMPLING_FLAGS: dict[str, tuple[type, str]] = {
    "max_tokens": (int, "most tokens of a completion (default: 256)"),
    "min_tokens": (int, "fewest tokens of a completion"),
    "temperature": (float, "0: greedy (default: the model's, see --generation-config)"),
    "top_p": (float, "nucleus sampling"),
    "top_k": (int, "sample among the k most likely tokens"),
    "min_p": (float, "exclude tokens below this share of the most likely token's probability"),
    "n": (int, "completions per prompt"),
}


def main(arguments: Sequence[str]) -> int:
    options = _parser().read(arguments)
    prompts = _prompts(options)
    # A shared file or environment may hold server settings, too: they are checked, but not used.
    engine_config, server_config = load_settings((EngineConfig, ServerConfig), options, os.environ)
    if server_config.models and not engine_config.model:
        raise ConfigError("models: there are several; name the one that generates with --model DIR_OR_ID.")
    sampling_params_of(options, {})  # raises the errors of the flags before a model is loaded

    from engine.llm import LLM

    with LLM.from_config(engine_config) as llm:
        params = sampling_params_of(options, llm.sampling_defaults.as_dict())
        progress = sys.stderr.isatty() and len(prompts) > 1
        if options["chat"]:
            outputs = llm.chat([[{"role": "user", "content": text}] for text in prompts], params, use_tqdm=progress)
        else:
            outputs = llm.generate(prompts, params, use_tqdm=progress)
    write = _print_json if options["json"] else _print_text
    write(prompts, outputs)
    return 0


def _parser() -> Parser:
    parser = Parser(
        "generate", "[PROMPT ...]", "Complete prompts offline. Without PROMPT and --prompts, stdin is one prompt."
    )
    parser.add_argument("prompt", nargs="*", metavar="PROMPT", help="text to continue")
    parser.add_argument("--prompts", metavar="FILE", help="file with one prompt per line; - is stdin")
    parser.add_argument("--chat", action="store_true", help="render each prompt with the model's chat template")
    parser.add_argument("--json", action="store_true", help="one JSON object per prompt and line")
    parser.add_argument("--stop", action="append", metavar="TEXT", help="end at this text; may be repeated")
    parser.add_argument("--sampling-seed", type=int, metavar="INT", help="makes sampling repeatable")
    for name, (number, text) in SAMPLING_FLAGS.items():
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=number, default=argparse.SUPPRESS, metavar=number.__name__.upper(), help=text)
    add_flags(parser, EngineConfig)
    return parser


def _prompts(options: dict[str, Any]) -> list[str]:
    """The prompts in the arguments, else the lines of a file, else the whole of stdin. ConfigError if there is none."""
    if options["prompt"] and options["prompts"]:
        raise ConfigError("give prompts as arguments or with --prompts, not both.")
    if options["prompts"]:
        # Not splitlines(), which also splits at characters such as U+2028 that may occur inside a prompt.
        prompts = [line for line in _read(options["prompts"]).split("\n") if line.strip()]
    elif options["prompt"]:
        prompts = options["prompt"]
    else:
        prompts = [] if sys.stdin.isatty() else [_read("-").rstrip("\n")]
    if not all(map(is_valid_unicode, prompts)):
        raise ConfigError("a prompt is not UTF-8 text.")  # the locale may decode such bytes to lone surrogates
    if not prompts or not any(prompts):
        raise ConfigError('there is no prompt; try: pageserve generate "Once upon a time"')
    return prompts


def _read(name: str) -> str:
    """The text of a file; "-" is stdin."""
    try:
        return sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--prompts: cannot read {name}: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{'stdin' if name == '-' else name} is not UTF-8 text.") from None


def sampling_params_of(options: dict[str, Any], defaults: dict[str, Any]) -> SamplingParams:
    """The sampling parameters; flags win over the model's defaults. Raises ConfigError."""
    given = {name: options[name] for name in SAMPLING_FLAGS if name in options}
    try:
        return SamplingParams(
            **{"max_tokens": 256, **defaults, **given}, stop=tuple(options["stop"] or ()), seed=options["sampling_seed"]
        )
    except InvalidRequestError as error:
        raise ConfigError(str(error)) from None


def _print_text(prompts: list[str], outputs: list[RequestOutput]) -> None:
    """Print the completions; if there are several, each with a heading line."""
    several = len(outputs) > 1 or len(outputs[0].outputs) > 1
    for number, output in enumerate(outputs, start=1):
        for sample in output.outputs:
            if several:
                print(f"--- prompt {number} of {len(outputs)}, sample {sample.index + 1}")
            print(sample.text)


def _print_json(prompts: list[str], outputs: list[RequestOutput]) -> None:
    for prompt, output in zip(prompts, outputs, strict=True):
        samples = [
            {"index": sample.index, "text": sample.text, "finish_reason": str(sample.finish_reason)}
            for sample in output.outputs
        ]
        usage = {"prompt_tokens": output.num_prompt_tokens, "completion_tokens": output.num_generated_tokens}
        print(json.dumps({"prompt": prompt, "outputs": samples, "usage": usage}, ensure_ascii=False))
