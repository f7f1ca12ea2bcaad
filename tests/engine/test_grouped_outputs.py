"""A stream whose reader asks for several tokens at a time: nothing is lost, and neither the start nor an end waits."""

import pytest

from engine.errors import EngineError
from tests.checkpoints import save_fake_checkpoint
from tests.engine.driving import PROMPT, request, running_driver
from tests.fake_device import expected_tokens

NUM_TOKENS = 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_fake_checkpoint(tmp_path_factory.mktemp("model"))


async def read(driver, num_tokens, **params):
    """The token ids of each output, by sample. The device's steps take time, so the reader is never late."""
    stream = driver.generate(request("a", **{"max_tokens": NUM_TOKENS, **params}))
    stream.group(num_tokens)
    groups = [[] for _ in range(params.get("n", 1))]
    try:
        async for output in stream:
            for sample in output.outputs:
                groups[sample.index].append(list(sample.token_ids))
    except EngineError as error:
        return groups, error
    return groups, None


def joined(group):
    return [token_id for token_ids in group for token_id in token_ids]


def sizes(group):
    return [len(token_ids) for token_ids in group]


@pytest.mark.parametrize("params", [{}, {"stop": ["never in the text"]}, {"logprobs": 2}], ids=str)
async def test_the_first_token_comes_alone_and_the_end_with_what_is_left(folder, params):
    async with running_driver(folder, "--step-seconds", "0.02") as driver:
        [group], _ = await read(driver, 8, **params)
    assert sizes(group) == [1, 8, 8, 8, 5]
    assert joined(group) == expected_tokens(PROMPT, 7, NUM_TOKENS)


async def test_without_a_group_each_token_is_an_output(folder):
    async with running_driver(folder, "--step-seconds", "0.02") as driver:
        [group], _ = await read(driver, 1)
    assert sizes(group) == [1] * NUM_TOKENS


async def test_a_reader_of_the_whole_gets_the_first_token_and_the_rest(folder):
    async with running_driver(folder, "--step-seconds", "0.02") as driver:
        [group], _ = await read(driver, 10**9)
    assert sizes(group) == [1, NUM_TOKENS - 1]


async def test_samples_come_together(folder):
    async with running_driver(folder, "--step-seconds", "0.02") as driver:
        groups, _ = await read(driver, 8, n=3)
    assert [sizes(group) for group in groups] == [[1, 8, 8, 8, 5]] * 3


async def test_an_error_comes_after_the_tokens_before_it(folder):
    expected = expected_tokens(PROMPT, 7, NUM_TOKENS)
    bad = next(i for i in range(10, NUM_TOKENS) if expected[i] not in expected[:i])
    async with running_driver(folder, "--step-seconds", "0.02", "--fail-on-token", str(expected[bad])) as driver:
        [group], error = await read(driver, 1000)
    assert isinstance(error, EngineError)
    assert joined(group) == expected[: bad + 1]  # to compute the token after it fails
