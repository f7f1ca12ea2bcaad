"""GrammarCache: compiled grammars of this Worker, the ones used last, and a thread that compiles the next."""

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
    """One thread steps and another prepares; compiling releases the GIL, so the first goes on meanwhile."""

    def __init__(self) -> None:
        self._compiler: Compiler | None = None
        self._matchers: OrderedDict[StructuredOutput, LLMatcher] = OrderedDict()  # each at its start
        self._endings: dict[StructuredOutput, Ending] = {}  # of those of JSON
        self._numbers: JsonNumbers | None = None
        self._ends: GrammarEnds | None = None
        self._lock = threading.Lock()  # of the dicts
        self._tables = threading.Lock()
        self._thread: ThreadPoolExecutor | None = None

    @property
    def num_words(self) -> int:
        """Of 32 tokens each, in a mask."""
        return self._loaded().num_words

    def set_vocabulary(self, vocabulary: Vocabulary) -> None:
        """Load it: up to a second for a large one, once in a Worker's life."""
        self._compiler, self._numbers, self._ends = Compiler(vocabulary), None, None

    def prepare(self, message: PrepareGrammar, reply: Callable[[GrammarPrepared], None]) -> None:
        """Compile in the thread; `reply` is called there."""
        self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._thread.submit(self._prepare, message.output, reply)

    def start(self, output: StructuredOutput) -> "LLMatcher":
        """A matcher of its own at the start; compiles where nobody prepared it. Raises GrammarError."""
        with self._lock:
            matcher = self._matchers.get(output)
            if matcher is not None:
                self._matchers.move_to_end(output)
        return (matcher or self._compile(output)).deep_copy()

    def limits(self, output: StructuredOutput) -> "tuple[JsonNumbers, GrammarEnds, Ending] | None":
        """What keeps JSON within sense and within its tokens, with what is known of a text at its start."""
        with self._lock:
            ending = self._endings.get(output)
        if ending is None or self._numbers is None or self._ends is None:
            return None
        return self._numbers, self._ends, ending.fresh()

    def renew(self, output: StructuredOutput) -> "LLMatcher":
        """As `start`, but compiled anew: copies of one matcher share the states that they found, and their limit."""
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
        except OSError:  # the Driver has gone
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
        """The first time with the tables of the vocabulary, which take some tenths of a second for a large one."""
        with self._tables:
            if self._ends is None:
                compiler = self._loaded()
                texts = compiler.token_texts()
                self._numbers = JsonNumbers(texts, compiler.num_words)
                self._ends = GrammarEnds(compiler, texts)
        return self._ends.begin(matcher, output.ends)

    def _loaded(self) -> Compiler:
        if self._compiler is None:
            raise GrammarError("the Worker was sent no vocabulary")
        return self._compiler
