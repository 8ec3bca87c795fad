"""Diffs are applied exactly where they say, or not at all."""

from __future__ import annotations

import difflib
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynamo_worker_ext.errors import PatchFormatError
from dynamo_worker_ext.patching.diff import Difference, parse

HEAD = "--- a/p/f\n+++ b/p/f\n"
LINES = st.lists(st.sampled_from(["a\n", "b\n", "\n", "c\r\n", "\x0c\n", "ü\u2028\n"]), max_size=30)


def unified(before: list[str], after: list[str], context: int) -> bytes:
    lines = difflib.unified_diff(before, after, "a/p/f", "b/p/f", n=context)
    return "".join(lines).encode()


@given(LINES, LINES, st.integers(0, 3))
def test_what_difflib_writes_is_applied_and_taken_back(
    before: list[str], after: list[str], context: int
) -> None:
    if before == after:
        return
    made = parse(unified(before, after, context), "x.patch")["p/f"]
    old, new = "".join(before).encode(), "".join(after).encode()
    assert made.apply(old) == new
    assert made.reversed().apply(new) == old
    assert made.reversed().reversed() == made


def test_a_change_elsewhere_in_the_file_is_not_looked_for() -> None:
    before = [f"{n}\n" for n in range(30)]
    after = [*before[:20], "new\n", *before[20:]]
    made = parse(unified(before, after, 1), "x.patch")["p/f"]
    shifted = ["one more\n", *before]
    found = made.apply("".join(shifted).encode())
    assert found == Difference(20, "19", "18")
    assert str(found) == "line 20: expected '19', found '18'"


def test_a_file_that_ends_too_early_is_said_to() -> None:
    made = parse((HEAD + "@@ -3,2 +3,1 @@\n c\n-d\n").encode(), "x.patch")["p/f"]
    assert str(made.apply(b"a\nb\nc\n")) == "line 4: expected 'd', found the end of the file"
    assert str(made.apply(b"a\nb\nc\nd")) == "line 4: expected 'd', found 'd'"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "changes nothing"),
        (HEAD, "changes nothing"),
        ("@@ -1 +1 @@\n-a\n+b\n", "expected a file"),
        ("--- p/f\n+++ p/f\n@@ -1 +1 @@\n-a\n+b\n", "expected '--- a/PATH'"),
        ("--- a/p/f\n+++ b/p/g\n@@ -1 +1 @@\n-a\n+b\n", "expected '--- a/PATH'"),
        ("--- a/p/f\n", "expected '--- a/PATH'"),
        (HEAD + "@@ -1 +1 @@\n-a\n+b\n" + HEAD + "@@ -1 +1 @@\n-a\n+b\n", "in it twice"),
        (HEAD + "@@ -1,2 +1 @@\n-a\n+b\n", "does not have the lines"),
        (HEAD + "@@ -1 +1 @@\n-a\n+b\n+c\n", "expected a file or a hunk"),
        (HEAD + "@@ -1 +1 @@\n-a\n+b\n\\ No newline at end of file\n", "expected a file or a hunk"),
        (HEAD + "@@ -1 +1 @@\n-a\n+b", "is no diff"),
        (HEAD + "@@ -5 +5 @@\n-a\n+b\n@@ -5 +5 @@\n-a\n+b\n", "out of place"),
        (HEAD + "@@ -5 +6 @@\n-a\n+b\n", "out of place"),
        (HEAD + "@@ -1 +1 @@\n?a\n+b\n", "is no diff"),
    ],
)
def test_what_is_no_such_diff_is_refused(text: str, said: str) -> None:
    with pytest.raises(PatchFormatError, match=said):
        parse(text.encode(), "x.patch")


def test_a_large_file_with_many_hunks() -> None:
    draw = random.Random(0)
    before = [f"{draw.random()}\n" for _ in range(5000)]
    after = [line for line in before if draw.random() > 0.01]
    for _ in range(50):
        after.insert(draw.randrange(len(after)), "new\n")
    made = parse(unified(before, after, 1), "x.patch")["p/f"]
    assert made.apply("".join(before).encode()) == "".join(after).encode()
