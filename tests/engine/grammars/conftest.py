import pytest

from engine.checkpoint.locate import read_eos_token_ids, resolve_model
from engine.config import EngineConfig
from engine.grammars.compiler import Compiler
from engine.structured_output import Vocabulary
from engine.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def compiler():
    """A compiler with the vocabulary of the bundled model."""
    folder = resolve_model(EngineConfig())
    tokenizer = Tokenizer(folder)
    yield Compiler(Vocabulary(tokenizer.to_json(), tokenizer.vocab_size, read_eos_token_ids(folder)))
    tokenizer.close()
