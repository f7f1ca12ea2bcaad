"""The inputs of a step of decodes, against the same in numpy."""

import numpy as np
import pytest

from kernels.dispatch import cpu_kernels

pytestmark = pytest.mark.skipif(cpu_kernels() is None, reason="numba is not installed")
MAX_ROWS, MAX_TOKENS, BLOCK_SIZE, MAX_BLOCKS = 9, 50, 8, 7


def make(seed=0):
    """(rows of random sequences, empty inputs, DecodeRows)."""
    kernels, rng = cpu_kernels().decode_rows, np.random.default_rng(seed)
    computed = rng.integers(0, MAX_TOKENS - 2, MAX_ROWS)
    rows = kernels.Rows(
        num_tokens=computed + 1,
        num_computed=computed,
        num_blocks=computed // BLOCK_SIZE + 1,
        token_ids=rng.integers(0, 1000, (MAX_ROWS, MAX_TOKENS), np.int32),
        block_table=rng.integers(0, 100, (MAX_ROWS, MAX_BLOCKS), np.int32),
    )
    inputs = kernels.DecodeInputs(
        np.full(MAX_ROWS, -7, np.int64),
        np.zeros(MAX_ROWS, np.int64),
        *(np.full(MAX_ROWS, -7, np.int64) for _ in range(4)),
        seq_lens=np.full(MAX_ROWS, -7, np.int32),
        block_tables=np.full((MAX_ROWS, MAX_BLOCKS), -7, np.int32),
    )
    return rows, inputs, kernels.DecodeRows(rows, inputs, BLOCK_SIZE)


def copies(arrays):
    return type(arrays)(*(array.copy() for array in arrays))


@pytest.mark.parametrize("chosen", [[4], [0, 1, 2, 3, 4, 5, 6, 7, 8], [8, 0, 3], []])
def test_a_token_of_each_row_is_next(chosen):
    rows, inputs, gathered = make(len(chosen))
    before, count = copies(rows), len(chosen)
    inputs.rows[:count] = chosen
    unused = copies(inputs)
    assert gathered.advance(count)
    positions = before.num_computed[chosen]
    assert inputs.positions[:count].tolist() == positions.tolist()
    assert inputs.lengths[:count].tolist() == inputs.seq_lens[:count].tolist() == (positions + 1).tolist()
    assert inputs.input_ids[:count].tolist() == before.token_ids[chosen, positions].tolist()
    blocks = before.block_table[chosen, positions // BLOCK_SIZE]
    assert inputs.slots[:count].tolist() == (blocks * BLOCK_SIZE + positions % BLOCK_SIZE).tolist()
    for i, row in enumerate(chosen):
        n = before.num_blocks[row]
        assert inputs.block_tables[i, :n].tolist() == before.block_table[row, :n].tolist()
    for array, was in zip(inputs[1:], unused[1:], strict=True):
        assert (array[count:] == was[count:]).all(), "of rows that the step does not have"

    tokens = np.arange(count, dtype=np.int64) - 1  # the first failed
    gathered.store(tokens.ctypes.data)
    expected = before.token_ids.copy()
    expected[chosen, positions + 1] = tokens.clip(min=0)
    assert (rows.token_ids == expected).all()
    step = np.isin(np.arange(MAX_ROWS), chosen)
    assert (rows.num_computed == before.num_computed + step).all() and (
        rows.num_tokens == before.num_tokens + step
    ).all()


def test_tokens_of_drafts_follow_the_decodes():
    rows, inputs, gathered = make(2)
    rows.num_computed[[1, 6]], rows.num_tokens[[1, 6]], rows.num_blocks[[1, 6]] = (6, 20), (7, 21), (2, 3)
    before, chosen, offsets = copies(rows), np.array([6, 1, 3, 1, 1, 3]), np.array([0, 0, 0, 1, 2, 1])
    inputs.rows[:6], inputs.offsets[:6] = chosen, offsets
    rows.num_blocks[3] = before.num_blocks[3] = before.num_computed[3] // BLOCK_SIZE + 2
    assert gathered.advance(6)
    positions = before.num_computed[chosen] + offsets
    assert inputs.positions[:6].tolist() == positions.tolist()
    assert inputs.lengths[:6].tolist() == inputs.seq_lens[:6].tolist() == (positions + 1).tolist()
    assert inputs.input_ids[:6].tolist() == before.token_ids[chosen, positions].tolist()
    blocks = before.block_table[chosen, positions // BLOCK_SIZE]
    assert inputs.slots[:6].tolist() == (blocks * BLOCK_SIZE + positions % BLOCK_SIZE).tolist()
    computed = before.num_computed[[6, 1, 3]] + [1, 3, 2]
    assert rows.num_computed[[6, 1, 3]].tolist() == computed.tolist()
    assert rows.num_tokens[[6, 1, 3]].tolist() == (computed + 1).tolist()
    tokens = np.arange(6)
    gathered.store(tokens.ctypes.data)
    assert rows.token_ids[chosen, positions + 1].tolist() == tokens.tolist()


def test_a_draft_without_a_block_leaves_everything_as_it_was():
    rows, inputs, gathered = make()
    rows.num_computed[2], rows.num_tokens[2], rows.num_blocks[2] = 6, 7, 1
    inputs.rows[:3], inputs.offsets[:3] = 2, [0, 1, 2]
    before = copies(rows), copies(inputs)
    assert not gathered.advance(3)
    for arrays, was in zip((rows, inputs), before, strict=True):
        assert all((a == b).all() for a, b in zip(arrays, was, strict=True))
    assert gathered.advance(2)


@pytest.mark.parametrize("fault", ["another number of tokens", "no block", "an unknown token"])
def test_a_row_with_a_fault_leaves_everything_as_it_was(fault):
    rows, inputs, gathered = make()
    inputs.rows[:4] = [3, 5, 7, 1]
    if fault == "another number of tokens":
        rows.num_tokens[1] += 1
    elif fault == "no block":
        rows.num_blocks[1] -= 1
    else:
        rows.token_ids[1, rows.num_computed[1]] = -2
    before = copies(rows), copies(inputs)
    assert not gathered.advance(4)
    for arrays, was in zip((rows, inputs), before, strict=True):
        assert all((a == b).all() for a, b in zip(arrays, was, strict=True))
    assert gathered.advance(3)
