"""Small checkpoints for tests, made on the spot."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.fake_device import EOS_TOKEN_ID, VOCAB_SIZE

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    """Token id = byte value for 0 to 255, then <|im_start|> 256, <|im_end|> 257 (the end), <|pad|> 258."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    spelling = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocab={spelling[byte]: byte for byte in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<|im_start|>", "<|im_end|>", "<|pad|>")])
    return tokenizer


def save_fake_checkpoint(folder: Path, chat_template: str | None = CHAT_TEMPLATE) -> Path:
    """Write a tokenizer and a config.json, all that the Driver reads; serve the folder with load_format="dummy"."""
    folder.mkdir(parents=True, exist_ok=True)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>"} | ({"chat_template": chat_template} if chat_template else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    config = {"architectures": ["LlamaForCausalLM"], "vocab_size": VOCAB_SIZE, "eos_token_id": EOS_TOKEN_ID}
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "llama", "max_position_embeddings": 512}))
    return folder
