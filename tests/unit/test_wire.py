"""What a frontend may put into a request, and what becomes of what it may not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dynamo_worker_ext import wire
from dynamo_worker_ext.errors import RequestError

MB = 1024 * 1024
HASH_A, HASH_B = "a" * 64, "b" * 64


def request_with(**extra: Any) -> dict[str, Any]:
    """Two images over shm, as Dynamo 1.6.1 writes them; `extra` replaces or removes (None)."""
    args: dict[str, Any] = {
        "mm_hashes": [HASH_A, HASH_B],
        "mm_hashes_by_modality": {"image": [HASH_A, HASH_B]},
        "mm_placeholders": [[2, 4], [8, 4]],
        "mm_placeholders_by_modality": {"image": [[2, 4], [8, 4]]},
        "expanded_token_ids": list(range(20)),
        "mm_kwargs_shm": {
            "modality": "image",
            "items": [
                {"name": "mm_kwargs_1_a_0", "size": 10},
                {"name": "mm_kwargs_1_a_1", "size": 20},
            ],
            "mm_hashes": [HASH_A, HASH_B],
        },
    }
    args.update(extra)
    return {"token_ids": [1, 2, 3], "extra_args": {k: v for k, v in args.items() if v is not None}}


def parse(request: dict[str, Any]) -> wire.MediaRequest:
    return wire.parse(request, max_item_bytes=MB)


def reason(request: dict[str, Any]) -> str:
    media = parse(request)
    assert media.transfer is None
    assert media.transfer_error is not None
    return media.transfer_error.reason


def test_dynamos_shm_form_is_read() -> None:
    transfer = parse(request_with()).transfer
    assert transfer is not None
    assert transfer.offers == {
        "shm": {0: wire.ShmRef("mm_kwargs_1_a_0", 10), 1: wire.ShmRef("mm_kwargs_1_a_1", 20)}
    }
    assert [item.mm_hash for item in transfer.items] == [HASH_A, HASH_B]
    assert transfer.items[1].placeholder == wire.Placeholder(8, 4)
    assert transfer.is_complete("shm")


def test_dynamos_nixl_form_is_read() -> None:
    spec = {
        "field_name": "__pickled_kwargs_item__",
        "shape": [3, 5],
        "dtype_str": "uint8",
        "serialized_request": {"descriptors": []},
    }
    transfer = parse(
        request_with(
            mm_kwargs_shm=None,
            mm_kwargs_nixl={"modality": "image", "tensor_specs": [spec, spec], "mm_hashes": []},
        )
    ).transfer
    assert transfer is not None
    assert {i: ref.size for i, ref in transfer.offers["nixl"].items()} == {0: 15, 1: 15}


@pytest.mark.parametrize("modality", ["image", "video", "audio"])
def test_every_modality_is_read_by_name(modality: str) -> None:
    request = request_with(mm_hashes=None, mm_placeholders=None)
    extra = request["extra_args"]
    extra["mm_kwargs_shm"]["modality"] = modality
    extra["mm_hashes_by_modality"] = {modality: [HASH_A, HASH_B]}
    extra["mm_placeholders_by_modality"] = {modality: [[2, 4], [8, 4]]}
    media = parse(request)
    assert media.transfer is not None
    assert {item.modality for item in media.transfer.items} == {modality}


def test_hashes_of_the_metadata_do_when_the_request_has_none() -> None:
    media = parse(request_with(mm_hashes=None, mm_hashes_by_modality=None))
    assert media.transfer is not None
    assert [item.mm_hash for item in media.transfer.items] == [HASH_A, HASH_B]


def test_a_placeholder_with_a_mask_is_read() -> None:
    mask = [False, True, True, False]
    where = [{"offset": 2, "length": 4, "is_embed": mask}, [8, 4]]
    media = parse(request_with(mm_placeholders=where, mm_placeholders_by_modality=None))
    assert media.transfer is not None
    assert media.transfer.items[0].placeholder.is_embed == tuple(mask)


def test_a_request_without_media_is_text() -> None:
    media = parse({"token_ids": [1, 2]})
    assert media == wire.MediaRequest([1, 2])


@pytest.mark.parametrize("extra_args", [None, {}, []])
def test_absent_extra_args_are_no_error(extra_args: Any) -> None:
    assert parse({"token_ids": [1], "extra_args": extra_args}).transfer is None


def test_fewer_items_than_hashes_is_kept_and_known() -> None:
    request = request_with()
    del request["extra_args"]["mm_kwargs_shm"]["items"][0]
    media = parse(request)
    assert media.transfer is not None
    assert not media.transfer.is_complete("shm")
    assert media.transfer.offers == {"shm": {}}, "nothing says which item it is"


@pytest.mark.parametrize(
    "value",
    ["", "a" * 15, "a" * 17, "a" * 63, "a" * 65, "A" * 64, "0x" + "a" * 14, "-" + "a" * 15,
     " " + "a" * 15, "a" * 16 + "\n", 7, None, "g" * 16],
)  # fmt: skip
def test_a_hash_that_is_not_16_or_64_hex_is_malformed(value: Any) -> None:
    hashes = [HASH_A, value]
    request = request_with(mm_hashes=hashes, mm_hashes_by_modality=None)
    request["extra_args"]["mm_kwargs_shm"]["mm_hashes"] = []
    assert reason(request) == "invalid_hash"


def test_hashes_that_contradict_each_other_are_malformed() -> None:
    request = request_with()
    request["extra_args"]["mm_kwargs_shm"]["mm_hashes"] = [HASH_B, HASH_A]
    assert reason(request) == "invalid_hash"


@pytest.mark.parametrize("size", [0, -1, 2**40, MB + 1, "10", 1.5, None, True])
def test_a_size_that_is_absurd_is_malformed(size: Any) -> None:
    request = request_with()
    request["extra_args"]["mm_kwargs_shm"]["items"][0]["size"] = size
    assert reason(request) == "invalid_size"


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "a/b", "/x", ".hidden", "a\0b", "a b", "x" * 300, "a\n", 5]
)
def test_a_name_that_is_not_plain_is_malformed(name: Any) -> None:
    request = request_with()
    request["extra_args"]["mm_kwargs_shm"]["items"][0]["name"] = name
    assert reason(request) == "invalid_name"


@pytest.mark.parametrize(
    "places",
    [[[2, 4], [5, 4]], [[2, 4], [2, 4]], [[-1, 4], [8, 4]], [[2, 0], [8, 4]], [[2, 4], [18, 4]],
     [[2, 4], [8]], [[2, 4], "x"], [[2, 4], [8.0, 4]], [[2, 4], [True, 4]],
     [[2, 4], {"offset": 8, "length": 4, "is_embed": [True]}],
     [[2, 4], {"offset": 8, "length": 4, "is_embed": "yes"}], [[2, 4], {"offset": 8}]],
)  # fmt: skip
def test_placeholders_out_of_range_or_overlapping_are_malformed(places: Any) -> None:
    request = request_with(mm_placeholders=places, mm_placeholders_by_modality=None)
    assert reason(request) == "invalid_placeholder"


@pytest.mark.parametrize("change", ["hash", "placeholder", "item", "none"])
def test_counts_that_differ_are_malformed(change: str) -> None:
    request = request_with(mm_hashes_by_modality=None, mm_placeholders_by_modality=None)
    extra = request["extra_args"]
    if change == "hash":
        extra["mm_hashes"] = extra["mm_kwargs_shm"]["mm_hashes"] = [HASH_A]
    elif change == "placeholder":
        extra["mm_placeholders"] = [[2, 4]]
    elif change == "item":
        extra["mm_kwargs_shm"]["items"].append({"name": "c", "size": 1})
    else:
        extra["mm_placeholders"] = []
    assert reason(request) == "invalid_count"


@pytest.mark.parametrize("tokens", [None, [], "1,2", [1, -1], [1, 2**31], [1, 1.5], [True] * 20])
def test_expanded_tokens_that_are_no_tokens_are_malformed(tokens: Any) -> None:
    request = request_with()
    request["extra_args"]["expanded_token_ids"] = tokens
    assert reason(request) == "invalid_tokens"


@pytest.mark.parametrize(
    "metadata",
    ["x", [], 5, {}, {"modality": "image"}, {"modality": "hologram", "items": []},
     {"modality": "image", "items": []}],
)  # fmt: skip
def test_metadata_of_another_form_is_malformed(metadata: Any) -> None:
    assert reason(request_with(mm_kwargs_shm=metadata)).startswith("invalid_")


def test_malformed_metadata_leaves_raw_media_usable() -> None:
    request = request_with(mm_kwargs_shm="x")
    request["multi_modal_data"] = {"image_url": [{"Url": "data:,"}]}
    media = parse(request)
    assert media.transfer_error is not None
    assert media.raw == {"image": [{"Url": "data:,"}]}


def test_the_error_names_what_was_wrong_but_not_everything_that_came() -> None:
    request = request_with()
    request["extra_args"]["mm_kwargs_shm"]["items"][0]["name"] = "/" + "x" * 10_000
    error = parse(request).transfer_error
    assert error is not None
    assert "name" in str(error)
    assert "'/xxx" in str(error)
    assert len(str(error)) < 300


@pytest.mark.parametrize("text", ["x" * 10_000, "x` - at `$.items[9][9].size", "`$[7].a"])
def test_what_came_cannot_pass_for_a_part_of_the_error(text: str) -> None:
    request = request_with()
    request["extra_args"]["mm_kwargs_shm"]["modality"] = text
    error = parse(request).transfer_error
    assert error is not None
    assert error.reason.startswith("invalid_")
    assert "`$.mm_kwargs_shm.modality`" in str(error)
    assert len(str(error)) < 320


@pytest.mark.parametrize("field", ["mm_hashes", "mm_placeholders"])
def test_more_items_than_any_model_takes_are_malformed(field: str) -> None:
    request = request_with()
    request["extra_args"][field] = request["extra_args"][field] * wire.MAX_ITEMS
    assert reason(request) == "invalid_count"


def test_an_item_is_counted_by_its_index_and_not_by_what_else_is_offered() -> None:
    shm = {"modality": "image", "items": [{"name": n, "size": 5} for n in "ab"], "mm_hashes": []}
    transfer = parse(arena_request({1: arena_ref(1)}, mm_kwargs_shm=shm)).transfer
    assert transfer is not None
    assert transfer.offers["shm"] == {0: wire.ShmRef("a", 5), 1: wire.ShmRef("b", 5)}


@pytest.mark.parametrize(
    ("key", "value"),
    [("multi_modal_data", "x"), ("multi_modal_data", {"image_url": "x"}),
     ("multi_modal_data", {"image_url": ["x"]}), ("multi_modal_uuids", []),
     ("multi_modal_uuids", {"image": [1]}), ("mm_processor_kwargs", "x"),
     ("media_io_kwargs", [1])],
)  # fmt: skip
def test_what_the_client_itself_malformed_is_refused(key: str, value: Any) -> None:
    with pytest.raises(RequestError):
        parse({"token_ids": [1], key: value})


def test_unknown_fields_are_ignored() -> None:
    request = request_with()
    request["future"] = 1
    request["extra_args"]["future"] = {"x": 1}
    request["extra_args"]["mm_kwargs_shm"]["future"] = 1
    assert parse(request).transfer is not None


def test_identities_of_raw_media_are_the_clients_own_before_the_frontends() -> None:
    request = {
        "token_ids": [1],
        "extra_args": {"mm_hashes": ["a" * 16]},
        "multi_modal_data": {"image_url": [{"Url": "data:,"}]},
    }
    assert parse(request).identities("image") == ("a" * 16,)
    request["multi_modal_uuids"] = {"image_url": ["mine"]}
    assert parse(request).identities("image") == ("mine",)


def test_a_malformed_identity_of_raw_media_is_left_away() -> None:
    request = {
        "token_ids": [1],
        "extra_args": {"mm_hashes": ["nonsense"]},
        "multi_modal_data": {"image_url": [{"Url": "data:,"}]},
    }
    assert parse(request).identities("image") is None


# The arena, and several modalities


ITEMS = (
    wire.MediaItem("image", HASH_A, wire.Placeholder(2, 4)),
    wire.MediaItem("image", HASH_B, wire.Placeholder(14, 4)),
    wire.MediaItem("audio", "c" * 64, wire.Placeholder(8, 4)),
)


def arena_ref(at: int, **change: Any) -> wire.ArenaRef:
    where = {"part": 0, "slot": at, "offset": 65536 + 4096 * at, "size": 10 + at, "generation": 7}
    return wire.ArenaRef("arena_0123456789abcdef", "0" * 16, **where | change)


def arena_request(refs: dict[int, wire.ArenaRef], **extra: Any) -> dict[str, Any]:
    """Two images and an audio, of which the arena sends `refs`; `extra` replaces or removes."""
    written = wire.write_offer(
        "arena", [i.modality for i in ITEMS], [i.mm_hash for i in ITEMS], refs
    )
    args: dict[str, Any] = {
        "mm_hashes": None,
        "mm_hashes_by_modality": {"image": [HASH_A, HASH_B], "audio": ["c" * 64]},
        "mm_placeholders": None,
        "mm_placeholders_by_modality": {"image": [[2, 4], [14, 4]], "audio": [[8, 4]]},
        "mm_kwargs_shm": None,
        **json.loads(json.dumps(written)),
    }
    return request_with(**args | extra)


def test_the_arenas_form_is_read_as_it_was_written() -> None:
    refs = {0: arena_ref(0), 1: arena_ref(1, generation=2**63 - 1), 2: arena_ref(2)}
    transfer = parse(arena_request(refs)).transfer
    assert transfer is not None
    assert transfer.items == ITEMS, "one modality after the other, each in its order"
    assert transfer.offers == {"arena": refs}
    assert transfer.is_complete("arena")


@pytest.mark.parametrize("sent", [[0], [1], [2], [0, 2], [1, 2], [2, 1]])
def test_a_partial_transfer_says_which_items_it_holds(sent: list[int]) -> None:
    refs = {at: arena_ref(at) for at in sent}
    transfer = parse(arena_request(refs)).transfer
    assert transfer is not None
    assert transfer.items == ITEMS
    assert transfer.offers == {"arena": refs}
    assert not transfer.is_complete("arena")


@pytest.mark.parametrize("missing", ["mm_hashes", "mm_hashes_by_modality"])
def test_hashes_of_the_arena_or_of_the_request_do(missing: str) -> None:
    request = arena_request({1: arena_ref(1)})
    extra = request["extra_args"]
    (extra["mm_kwargs_arena"] if missing == "mm_hashes" else extra).pop(missing)
    transfer = parse(request).transfer
    assert transfer is not None
    assert transfer.items == ITEMS


def test_a_modality_of_which_nothing_is_sent_belongs_to_the_transfer() -> None:
    request = arena_request({0: arena_ref(0)})
    request["extra_args"]["mm_kwargs_arena"]["mm_hashes"].pop("audio")
    transfer = parse(request).transfer
    assert transfer is not None
    assert [item.modality for item in transfer.items] == ["image", "image", "audio"]


def test_an_arena_and_shm_in_one_request_are_both_offered() -> None:
    shm = {"modality": "audio", "items": [{"name": "a", "size": 5}], "mm_hashes": ["c" * 64]}
    transfer = parse(arena_request({1: arena_ref(1)}, mm_kwargs_shm=shm)).transfer
    assert transfer is not None
    assert transfer.offers == {"arena": {1: arena_ref(1)}, "shm": {2: wire.ShmRef("a", 5)}}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"index": 2}, "invalid_count"),
        ({"index": -1}, "invalid_count"),
        ({"index": 2**40}, "invalid_count"),
        ({"index": True}, "invalid_count"),
        ({"index": 1}, "invalid_count"),  # named twice
        ({"modality": "video"}, "invalid_count"),
        ({"modality": "hologram"}, "invalid_metadata"),
        ({"size": 0}, "invalid_size"),
        ({"size": MB + 1}, "invalid_size"),
        ({"slot": -1}, "invalid_slot"),
        ({"slot": "0"}, "invalid_slot"),
        ({"part": 2**16}, "invalid_slot"),
        ({"offset": -1}, "invalid_slot"),
        ({"offset": 2**63}, "invalid_slot"),
        ({"generation": 0}, "invalid_slot"),
        ({"generation": 1.0}, "invalid_slot"),
    ],
)
def test_an_arenas_item_out_of_bounds_is_malformed(change: dict[str, Any], expected: str) -> None:
    request = arena_request({0: arena_ref(0), 1: arena_ref(1)})
    request["extra_args"]["mm_kwargs_arena"]["items"][0].update(change)
    assert reason(request) == expected


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"socket": "../x"}, "invalid_name"),
        ({"socket": "/dev/shm/x"}, "invalid_name"),
        ({"socket": None}, "invalid_name"),
        ({"host_id": "0" * 15}, "invalid_metadata"),
        ({"host_id": ""}, "invalid_metadata"),
        ({"items": []}, "invalid_metadata"),
        ({"items": "x"}, "invalid_metadata"),
        ({"mm_hashes": {"image": [HASH_B, HASH_A]}}, "invalid_hash"),
        ({"mm_hashes": {"image": ["x"]}}, "invalid_hash"),
        ({"mm_hashes": [HASH_A]}, "invalid_hash"),
        ({"mm_hashes": {"hologram": []}}, "invalid_hash"),
    ],
)
def test_an_arenas_metadata_out_of_bounds_is_malformed(
    change: dict[str, Any], expected: str
) -> None:
    request = arena_request({0: arena_ref(0)})
    request["extra_args"]["mm_kwargs_arena"].update(change)
    assert reason(request) == expected


@pytest.mark.parametrize("places", [{"image": [[2, 4], [14, 4]], "audio": [[5, 4]]}, {}])
def test_placeholders_of_all_modalities_are_checked_together(places: Any) -> None:
    request = arena_request({0: arena_ref(0)}, mm_placeholders_by_modality=places)
    assert reason(request) == ("invalid_placeholder" if places else "invalid_count")


def test_the_public_names_of_wire() -> None:
    assert all(hasattr(wire, name) for name in wire.__all__)
    assert wire.TRANSPORTS == ("arena", "shm", "nixl")


def test_embeddings_of_the_prompts_own_are_refused_and_not_left_out() -> None:
    media = {"image_url": [], "image_embeds": [{"data": "AAAA"}]}
    with pytest.raises(RequestError, match="image_embeds"):
        parse({"token_ids": [1], "multi_modal_data": media})
    assert parse({"token_ids": [1], "multi_modal_data": {"image_embeds": None}}).raw == {}
