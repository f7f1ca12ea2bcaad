"""A stream with a sink, which takes outputs while the reader waits: nothing is lost between the two."""

import pytest

from tests.checkpoints import save_fake_checkpoint
from tests.engine.driving import PROMPT, request, running_driver
from tests.fake_device import expected_tokens

NUM_TOKENS = 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_fake_checkpoint(tmp_path_factory.mktemp("model"))


class Sink:
    """Takes every output while `is_ready(number of tokens so far)`."""

    takes_text = False

    def __init__(self, is_ready=lambda num_tokens: True, fails_after=None):
        self.taken, self._is_ready, self._fails_after = [], is_ready, fails_after

    @property
    def ready(self):
        return self._is_ready(len(self.taken))

    def take(self, output):
        [part] = output.outputs
        self.taken.extend(part.token_ids)
        if self._fails_after is not None and len(self.taken) > self._fails_after:
            raise RuntimeError("no such chunk")


async def read(driver, sink, **params):
    """(tokens in the order in which reader and sink got them, tokens of the reader)."""
    stream = driver.generate(request("a", max_tokens=NUM_TOKENS, **params))
    stream.give_to(sink)
    everything = sink.taken
    for_reader = []
    async for output in stream:
        for part in output.outputs:
            everything.extend(part.token_ids)
            for_reader.extend(part.token_ids)
    return everything, for_reader


async def test_the_reader_gets_the_first_and_the_last_output_alone(folder):
    async with running_driver(folder, "--step-seconds", "0.03") as driver:
        everything, for_reader = await read(driver, Sink())
    expected = expected_tokens(PROMPT, 7, NUM_TOKENS)
    assert everything == expected
    assert for_reader == [expected[0], expected[-1]]


class SamplesSink:
    """Takes every output: the tokens of each of `num_samples` samples."""

    ready, takes_text = True, True

    def __init__(self, num_samples):
        self.taken = [[] for _ in range(num_samples)]

    def take(self, output):
        for part in output.outputs:
            self.taken[part.index].extend(part.token_ids)


async def test_a_sink_takes_the_tokens_of_every_sample(folder):
    sink = SamplesSink(3)
    async with running_driver(folder, "--step-seconds", "0.005") as driver:
        stream = driver.generate(request("a", max_tokens=NUM_TOKENS, n=3, temperature=1.0))
        stream.give_to(sink)
        num_read = 0
        async for output in stream:
            num_read += sum(len(part.token_ids) for part in output.outputs)
            sink.take(output)
    first, *others = sink.taken
    assert first == expected_tokens(PROMPT, 7, NUM_TOKENS)
    assert all(len(tokens) == NUM_TOKENS and tokens != first for tokens in others)
    assert num_read < NUM_TOKENS  # of 90: the first and the last ones


async def test_a_sink_that_is_not_ready_leaves_outputs_to_the_reader(folder):
    async with running_driver(folder, "--step-seconds", "0.002") as driver:
        everything, for_reader = await read(driver, Sink(lambda num_tokens: num_tokens % 3 == 0))
    assert everything == expected_tokens(PROMPT, 7, NUM_TOKENS)
    assert NUM_TOKENS // 2 < len(for_reader) < NUM_TOKENS


class TextSink(Sink):
    """Takes text where that is all there is."""

    takes_text = True

    def __init__(self):
        super().__init__()
        self.texts = []

    def take_text(self, text):
        self.texts.append(text)


async def test_a_sink_takes_bare_text(folder):
    sink, parts = TextSink(), []
    async with running_driver(folder, "--step-seconds", "0.03") as driver:
        stream = driver.generate(request("a", max_tokens=NUM_TOKENS))
        stream.give_to(sink)
        async for output in stream:
            [part] = output.outputs
            parts.append((len(sink.texts), part.text))
        other = driver.generate(request("b", max_tokens=NUM_TOKENS))
        whole = "".join([output.outputs[0].text async for output in other])
    [(before_first, first), (before_last, last)] = parts
    assert (before_first, before_last) == (0, NUM_TOKENS - 2) and sink.taken == []
    assert first + "".join(sink.texts) + last == whole


async def test_logprobs_come_with_whole_outputs(folder):
    sink = TextSink()
    async with running_driver(folder, "--step-seconds", "0.03") as driver:
        everything, for_reader = await read(driver, sink, logprobs=1)
    expected = expected_tokens(PROMPT, 7, NUM_TOKENS)
    assert everything == expected and for_reader == [expected[0], expected[-1]] and sink.texts == []


async def test_a_sink_takes_what_was_searched_for_stop_strings(folder):
    expected = expected_tokens(PROMPT, 7, NUM_TOKENS)
    letters = [chr(token) for token in expected]
    place = next(i for i in range(9, NUM_TOKENS) if letters[i] not in letters[:i])
    async with running_driver(folder, "--step-seconds", "0.03") as driver:
        everything, for_reader = await read(driver, Sink(), stop=["never in the text"])
        stopped, for_last_reader = await read(driver, Sink(), stop=[letters[place]])
    assert everything == expected and for_reader == [expected[0], expected[-1]]
    assert stopped == expected[: place + 1] and for_last_reader == [expected[0], expected[place]]


async def test_the_reader_raises_what_the_sink_raises(folder):
    sink = Sink(fails_after=5)
    async with running_driver(folder, "--step-seconds", "0.002") as driver:
        with pytest.raises(RuntimeError, match="no such chunk"):
            await read(driver, sink)
    assert sink.taken[:5] == expected_tokens(PROMPT, 7, 5)
