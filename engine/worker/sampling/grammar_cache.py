"""GrammarCache: the recently used compiled grammars of this Worker, and a thread that compiles new ones."""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from engine.executor.step import GrammarPrepared, PrepareGrammar
from engine.grammars.compiler import Compiler, GrammarError
from engine.structured_output import MAX_IN_WORKER, StructuredOutput, Vocabulary
from engine.worker.sampling.grammar_ends import Ending, GrammarEnds
from engine.worker.sampling.json_numbers import JsonNumbers

if TYPE_CHECKING:
    from llguidance import LLMatcher

logger = logging.getLogger(__name__)


class GrammarCache:
    """Compiled grammars by StructuredOutput. Thread-safe: the step's thread starts matchers while another compiles,
    which releases the GIL."""

    def __init__(self) -> None:
        self._compiler: Compiler | None = None
        self._matchers: OrderedDict[StructuredOutput, LLMatcher] = OrderedDict()  # each matcher at its start
        self._endings: dict[StructuredOutput, Ending] = {}  # for JSON grammars
        self._numbers: JsonNumbers | None = None
        self._ends: GrammarEnds | None = None
        self._lock = threading.Lock()  # guards the dicts
        self._tables = threading.Lock()
        self._thread: ThreadPoolExecutor | None = None

    @property
    def num_words(self) -> int:
        """Number of 32-bit words of a mask, one bit per token."""
        return self._loaded().num_words

    def set_vocabulary(self, vocabulary: Vocabulary) -> None:
        """Load the vocabulary, once in a Worker's life; takes up to a second for a large one."""
        self._compiler, self._numbers, self._ends = Compiler(vocabulary), None, None

    def prepare(self, message: PrepareGrammar, reply: Callable[[GrammarPrepared], None]) -> None:
        """Compile a grammar in the thread, which then calls `reply`."""
        self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._thread.submit(self._prepare, message.output, reply)

    def close(self) -> None:
        """Wait until every grammar is compiled and its answer is sent."""
        if self._thread is not None:
            self._thread.shutdown()

    def start(self, output: StructuredOutput) -> "LLMatcher":
        """A new matcher at its start; compiles the grammar if it was not prepared. Raises GrammarError."""
        with self._lock:
            matcher = self._matchers.get(output)
            if matcher is not None:
                self._matchers.move_to_end(output)
        return (matcher or self._compile(output)).deep_copy()

    def limits(self, output: StructuredOutput) -> tuple[JsonNumbers, GrammarEnds, Ending] | None:
        """The limits of a JSON text: of its numbers, of its length, and the Ending of a new text; None if not JSON."""
        with self._lock:
            ending = self._endings.get(output)
        if ending is None or self._numbers is None or self._ends is None:
            return None
        return self._numbers, self._ends, ending.fresh()

    def renew(self, output: StructuredOutput) -> "LLMatcher":
        """`start` from a new compilation: copies of a matcher share their states and the limit on their number."""
        with self._lock:
            self._matchers.pop(output, None)
        return self.start(output)

    def _prepare(self, output: StructuredOutput, reply: Callable[[GrammarPrepared], None]) -> None:
        error = ""
        try:
            self.start(output)
        except Exception as problem:
            logger.exception("a grammar could not be compiled")
            error = str(problem) or type(problem).__name__
        try:
            reply(GrammarPrepared(output.digest(), error))
        except OSError:  # the Driver is gone
            pass

    def _compile(self, output: StructuredOutput) -> "LLMatcher":
        matcher = self._loaded().compile(output)
        ending = self._begin(output, matcher) if output.holds_json else None
        with self._lock:
            self._matchers[output] = matcher
            if ending is not None:
                self._endings[output] = ending
            if len(self._matchers) > MAX_IN_WORKER:
                dropped, _ = self._matchers.popitem(last=False)
                self._endings.pop(dropped, None)
        return matcher

    def _begin(self, output: StructuredOutput, matcher: "LLMatcher") -> Ending:
        """The Ending of a JSON grammar. The first call makes the vocabulary's tables: tenths of a second for a large
        one."""
        with self._tables:
            if self._ends is None:
                compiler = self._loaded()
                texts = compiler.token_texts()
                self._numbers = JsonNumbers(texts, compiler.num_words)
                self._ends = GrammarEnds(compiler, texts)
        return self._ends.begin(matcher, output)

    def _loaded(self) -> Compiler:
        if self._compiler is None:
            raise GrammarError("the Worker was sent no vocabulary")
        return self._compiler
