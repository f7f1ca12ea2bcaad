"""The order of decodes in a step: sequences that begin with the same blocks are neighbours."""

import itertools

from engine.executor.step import NewSequence
from engine.sampling_params import SamplingParams
from engine.worker.batch.input_batch import InputBatch

BLOCK, TOKENS = 16, 600


def add(batch: InputBatch, seq_id: int, blocks: list[int], num_tokens: int = TOKENS) -> None:
    batch.add(
        NewSequence(
            seq_id=seq_id,
            token_ids=[1] * num_tokens,
            num_prompt_tokens=num_tokens,
            num_computed_tokens=num_tokens - 1,
            block_ids=blocks,
            params=SamplingParams(),
            seed=0,
        )
    )


def order(batch: InputBatch, decodes: list[int]) -> list[int]:
    return [int(batch.seq_ids[row]) for row in batch.decode_rows(decodes, [])]


def test_decodes_with_the_same_first_blocks_are_neighbours():
    """Prompts 0 to 2 by turns, all behind one block of a chat template; sequence 9 is shorter than any prompt."""
    batch, own = InputBatch(16, 1024, BLOCK), iter(range(1000, 2000))
    for seq_id in range(9):
        prompt = seq_id % 3
        add(batch, seq_id, [7, *range(100 * prompt, 100 * prompt + 33), *(next(own) for _ in range(4))])
    add(batch, 9, [7, next(own)], num_tokens=20)
    found = order(batch, list(range(10)))
    assert sorted(found) == list(range(10))
    prompts = [seq_id % 3 for seq_id in found if seq_id != 9]
    assert sum(a != b for a, b in itertools.pairwise(prompts)) == 2, "three runs"
    assert [seq_id for seq_id in found if seq_id % 3 == 1] == [1, 4, 7], "those that begin alike keep their order"
    batch.remove(4)
    assert [seq_id for seq_id in order(batch, [7, 0, 3, 1, 6]) if seq_id % 3 == 1] == [7, 1]


def test_prompts_that_part_between_the_places_are_neighbours_too():
    """Alike for 64 tokens, then apart, in two prompts by turns."""
    batch = InputBatch(8, 1024, BLOCK)
    for seq_id in range(6):
        first = 500 if seq_id % 2 else 700
        add(batch, seq_id, [*range(10), *range(first, first + 23), *range(2000 + 10 * seq_id, 2005 + 10 * seq_id)])
    assert [seq_id % 2 for seq_id in order(batch, list(range(6)))] in ([0, 0, 0, 1, 1, 1], [1, 1, 1, 0, 0, 0])


def test_a_short_table_has_an_order_too():
    batch = InputBatch(4, 32, BLOCK)
    for seq_id, block in enumerate((5, 3, 5)):
        add(batch, seq_id, [9, block], num_tokens=20)
    assert order(batch, [0, 1, 2]) in ([1, 0, 2], [0, 2, 1])
