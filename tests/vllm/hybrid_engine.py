"""Runs in a process of its own: a real vLLM engine of a hybrid model, and a router's view of it.

    python tests/vllm/hybrid_engine.py MODEL OUT

Like kv_events_engine.py, with conversations that go on, begin and come again by chance, in a cache
that is too small for them.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from tests.vllm.kv_events_engine import IMAGE, Bench, picture

BLOCKS = 160
REQUESTS = 60


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("out", type=Path, help="directory")
    args = parser.parse_args()
    bench = Bench(args.model, blocks=BLOCKS)
    words = "Describe the picture in detail, please. "

    bench.run("image", words * 4 + IMAGE + words, [picture(1)])
    bench.run("image, repeated", words * 4 + IMAGE + words, [picture(1)])
    bench.run("another image", words * 4 + IMAGE + words, [picture(2)])
    about = words + IMAGE + words * 3
    bench.run("question", about + "What is it?" * 20, [picture(3)])
    bench.run("another question", about + "Who made it?" * 20, [picture(3)])
    bench.run("one more question", about + "Where is it?" * 20, [picture(3)])
    answered = bench.run("answer", "Tell me all about it. " * 10, max_tokens=100)
    bench.run("after the answer", [*answered, *range(20, 60)])

    chance = random.Random(1)
    said: list[tuple[list[int], list[int]]] = []  # prompts, and with their answers

    def some(most: int) -> list[int]:
        return [chance.randrange(10, 200) for _ in range(chance.randrange(1, most))]

    for number in range(REQUESTS):
        kind = chance.choice(["new", "again", "on", "on", "on"]) if said else "new"
        prompt, whole = chance.choice(said) if said else ([], [])
        if kind == "new" or len(whole) > 800:
            prompt = some(400)
        elif kind == "on":
            prompt = whole + some(80)
        whole = bench.run(f"{kind} {number}", prompt, max_tokens=chance.choice([2, 60, 100]))
        said = [*said, (prompt, whole)][-12:]
    bench.settle()
    report = {
        "requests": bench.requests,
        "failures": [repr(error) for error in bench.failures],
        "removed": bench.metrics.kv_events.labels("removed")._value.get(),
        "dropped": bench.normalizer.statistics().dropped,
    }
    bench.close()
    (args.out / "report.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
