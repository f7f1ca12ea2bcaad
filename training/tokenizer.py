"""The tokenizer: byte-level BPE learned from the corpus, and the ChatML template."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from training.corpus import END_OF_TEXT, SPECIAL_TOKENS, Corpus

# Every turn is "<|im_start|>role\ncontent<|im_end|>\n". "developer" is OpenAI's newer word for "system".
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- set role = 'system' if message['role'] == 'developer' else message['role'] -%}
{%- if role not in ['system', 'user', 'assistant'] -%}
{{- raise_exception("role must be system, developer, user or assistant, not " + role) -}}
{%- endif -%}
{{- '<|im_start|>' + role + '\\n' + message['content'] + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


def train_tokenizer(corpus: Corpus, vocab_size: int, num_documents: int = 12_000) -> Tokenizer:
    """Byte-level BPE over the first documents; digits stay single tokens, so that sums are regular."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (
        text for i in range(num_documents) for text, learn in corpus.document(i).segments if learn or len(text) < 80
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
