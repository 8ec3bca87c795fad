"""Of a hybrid model the router has the blocks that lead to a state, and no others."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from dynamo_worker_ext.hashing import HashMode
from dynamo_worker_ext.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EngineEvent,
    Normalizer,
    StoredBlocks,
)

SIZE = 4
STATES = (0, 1)
MAIN = 2


class Engine:
    """An engine's events, and what a router makes of what it is told.

    Block n follows on block (n - 1) // 2, and each of its tokens is n.
    """

    def __init__(self, *, gated: bool = True) -> None:
        self._normalizer = Normalizer(
            HashMode.PAD_VALUE, frozenset(), SIZE, state_groups=STATES if gated else ()
        )
        self.copies: Counter[int] = Counter()
        self.hashes: dict[int, int] = {}  # the router's, by block
        for group in STATES:
            self._send(_stored([], None, group, "mamba"))

    @property
    def told(self) -> set[int]:
        return {block for block, key in self.hashes.items() if self.copies[key]}

    def store(self, *blocks: int) -> None:
        """Blocks of full attention that follow on each other."""
        parent = (blocks[0] - 1) // 2 if blocks[0] else None
        self._send(_stored(list(blocks), parent, MAIN, "full_attention"))

    def remove(self, block: int) -> None:
        self._send(BlockRemoved([block], group_idx=MAIN))

    def keep(self, block: int, *groups: int) -> None:
        for group in groups or STATES:
            self._send(_stored([block], None, group, "mamba"))

    def drop(self, block: int, group: int = 0) -> None:
        self._send(BlockRemoved([block], group_idx=group))

    def clear(self) -> None:
        self._send(AllBlocksCleared())

    def _send(self, event: EngineEvent) -> None:
        for out in self._normalizer.normalize(event):
            if not isinstance(out, StoredBlocks):
                for key in out.block_hashes:
                    assert self.copies[key] > 0, "removed what was not there"
                    self.copies[key] -= 1
                continue
            assert out.parent_hash is None or self.copies[out.parent_hash], "an orphan"
            told = [out.token_ids[i] for i in range(0, len(out.token_ids), SIZE)]
            assert len(told) == len(out.block_hashes)
            assert out.token_ids == [token for block in told for token in [block] * SIZE]
            self.hashes.update(zip(told, out.block_hashes, strict=True))
            self.copies.update(out.block_hashes)


def _stored(blocks: list[int], parent: int | None, group: int, kind: str) -> BlockStored:
    tokens = [block for block in blocks for _ in range(SIZE)]
    more: dict[str, Any] = {"group_idx": group, "kv_cache_spec_kind": kind}
    return BlockStored(list(blocks), parent, tokens, SIZE, **more)


def test_what_lies_behind_the_last_state_is_not_told() -> None:
    engine = Engine()
    engine.keep(3)  # vLLM tells of the state first
    engine.store(0, 1, 3)
    assert engine.told == {0, 1, 3}
    engine.store(7, 15)  # an answer, of which no state is kept
    assert engine.told == {0, 1, 3}
    engine.keep(15)  # the next turn
    assert engine.told == {0, 1, 3, 7, 15}


def test_without_states_everything_is_told() -> None:
    engine = Engine(gated=False)
    engine.store(0, 1, 3)
    assert engine.told == {0, 1, 3}


def test_a_state_of_each_group_is_needed() -> None:
    engine = Engine()
    engine.store(0, 1)
    engine.keep(1, 0)
    assert engine.told == set()
    engine.keep(1, 1)
    assert engine.told == {0, 1}
    engine.keep(1, 1)  # a copy of it
    engine.drop(1, 1)
    assert engine.told == {0, 1}
    engine.drop(1, 1)
    assert engine.told == set()


def test_a_lost_state_takes_back_what_led_to_it_alone() -> None:
    engine = Engine()
    engine.store(0, 1, 3)
    engine.store(2, 5)  # on another branch
    engine.keep(3)
    engine.keep(5)
    engine.keep(0)
    assert engine.told == {0, 1, 3, 2, 5}
    engine.drop(3)
    assert engine.told == {0, 2, 5}
    engine.drop(5)
    assert engine.told == {0}
    engine.keep(3, 0)
    assert engine.told == {0, 1, 3}


def test_a_block_that_is_gone_in_the_middle_is_told_again_when_it_is_back() -> None:
    engine = Engine()
    engine.store(0, 1, 3)
    engine.keep(3)
    engine.remove(1)
    assert engine.told == {3}, "0 leads nowhere; 3 has no one before it that a router could follow"
    engine.store(1)
    assert engine.told == {0, 1, 3}
    engine.remove(1)
    engine.drop(3)
    assert engine.told == set()
    engine.keep(3)
    assert engine.told == set(), "nobody can reach it"
    engine.store(1, 3)  # computed again, beside what was there
    assert engine.told == {0, 1, 3}


def test_long_prompts_need_no_deep_stack() -> None:
    engine = Engine()
    parent = None
    chain = list(range(100_000, 105_000))
    for first in range(0, len(chain), 100):
        part = chain[first : first + 100]
        engine._send(_stored(part, parent, MAIN, "full_attention"))
        parent = part[-1]
    engine.keep(chain[-1])
    assert engine.told == set(chain)
    engine.drop(chain[-1])
    assert engine.told == set()


def test_blocks_that_wait_are_told_as_they_would_have_been_at_once() -> None:
    plain, gated = (
        Normalizer(HashMode.BLOCK_MM_INFOS, frozenset(), SIZE, state_groups=groups)
        for groups in ((), STATES)
    )
    first = _stored([0, 1], None, MAIN, "full_attention")
    image = ["ab" * 32, 2]
    first = msgspec.structs.replace(
        first, extra_keys=[["adapter", image, "salt"], ["adapter", image]], lora_name="adapter"
    )
    second = _stored([3], 1, MAIN, "full_attention")
    second = msgspec.structs.replace(second, extra_keys=[["adapter"]], lora_name="adapter")
    at_once = [*plain.normalize(first), *plain.normalize(second)]
    assert gated.normalize(first) == gated.normalize(second) == []
    told = [
        *gated.normalize(_stored([3], None, 0, "mamba")),
        *gated.normalize(_stored([3], None, 1, "mamba")),
    ]
    one, two = (event.to_input() for event in at_once)
    assert [event.to_input() for event in told] == [
        {**one, **{key: one[key] + two[key] for key in ("token_ids", "num_block_tokens")},
         "block_hashes": one["block_hashes"] + two["block_hashes"],
         "block_mm_infos": [*one["block_mm_infos"], None]}
    ]  # fmt: skip


def test_everything_is_forgotten_once() -> None:
    engine = Engine()
    engine.store(0, 1, 3)
    engine.keep(1)
    engine.clear()
    assert engine.told == set()
    engine.store(0, 1)
    assert engine.told == set(), "the state is gone too"
    engine.keep(0)
    assert engine.told == {0}


operations = st.tuples(st.sampled_from(("store", "remove", "keep", "drop")), st.integers(0, 14))


@given(st.lists(st.tuples(operations, st.sampled_from(STATES)), max_size=80))
def test_the_router_has_what_leads_to_a_state(steps: list[tuple[tuple[str, int], int]]) -> None:
    """As long as blocks go from the end, as vLLM evicts them."""
    engine = Engine()
    stored: set[int] = set()
    kept: Counter[tuple[int, int]] = Counter()

    def leads(block: int) -> bool:
        if block not in stored:
            return False
        has_state = all(kept[group, block] for group in STATES)
        return has_state or leads(2 * block + 1) or leads(2 * block + 2)

    for (operation, block), group in steps:
        if (
            operation == "store"
            and block not in stored
            and (not block or (block - 1) // 2 in stored)
        ):
            stored.add(block)
            engine.store(block)
        elif (
            operation == "remove"
            and block in stored
            and not {2 * block + 1, 2 * block + 2} & stored
        ):
            stored.remove(block)
            engine.remove(block)
        elif operation == "keep":
            kept[group, block] += 1
            engine.keep(block, group)
        elif operation == "drop" and kept[group, block]:
            kept[group, block] -= 1
            engine.drop(block, group)
        assert engine.told == {one for one in stored if leads(one)}
