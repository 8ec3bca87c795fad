"""What the doctor finds, on machines and deployments that are pretended."""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from dynamo_worker_ext.card import WorkerCard
from dynamo_worker_ext.doctor import environment as environment_module
from dynamo_worker_ext.doctor.__main__ import main
from dynamo_worker_ext.doctor.deployment import deployment
from dynamo_worker_ext.doctor.discovery import SeenWorker
from dynamo_worker_ext.doctor.environment import PROVEN, environment
from dynamo_worker_ext.doctor.findings import Finding, Level, as_json, as_text, exit_status
from dynamo_worker_ext.doctor.probe import probe, tiny_png
from dynamo_worker_ext.hashing import HashMode
from tests.stack import free_port

SOUND = {
    "ai-dynamo": "1.6.1",
    "ai-dynamo-runtime": "1.6.1",
    "vllm": "0.31.0",
    "nixl": "1.4.1",
    "nixl-cu13": "1.4.1",
}


def machine(
    versions: Mapping[str, str] = SOUND, environ: Mapping[str, str] | None = None, **paths: Path
) -> list[Finding]:
    return environment(environ or {"UCX_NET_DEVICES": "lo"}, version_of=versions.get, **paths)


def problems(findings: list[Finding]) -> list[str]:
    found = [one for one in findings if one.level is Level.PROBLEM]
    assert all(one.advice and "\n" not in one.advice for one in found)
    return [one.text for one in found]


class TestEnvironment:
    def test_versions_that_belong_together_are_no_problem(self) -> None:
        assert problems(machine()) == []
        texts = [one.text for one in machine()]
        assert {"vllm 0.31.0", "ai-dynamo 1.6.1", "nixl 1.4.1"} <= set(texts)

    @pytest.mark.parametrize(
        ("changes", "says"),
        [
            ({"vllm": "0.30.0"}, "vllm 0.30.0, but this package was tested with 0.31.0"),
            ({"ai-dynamo": None}, "ai-dynamo is missing"),
            ({"ai-dynamo-runtime": "1.6.0"}, "ai-dynamo-runtime 1.6.0, but"),
            ({"vllm": None}, "no engine is installed"),
            ({"nixl-cu13": "1.5.0"}, "parts of NIXL that do not belong together: nixl 1.4.1, "
             "nixl-cu13 1.5.0"),
            ({"nixl": None}, "parts of NIXL that do not belong together: nixl missing"),
        ],
    )  # fmt: skip
    def test_versions_that_do_not_are(self, changes: dict[str, str | None], says: str) -> None:
        versions = {k: v for k, v in {**SOUND, **changes}.items() if v is not None}
        found = problems(machine(versions))
        assert len(found) == 1
        assert says in found[0]

    def test_nixl_is_not_needed(self) -> None:
        assert problems(machine({k: v for k, v in SOUND.items() if "nixl" not in k})) == []

    def test_what_counts_as_proven_is_what_the_project_pins(self) -> None:
        import tomllib

        content = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
        extras = content["project"]["optional-dependencies"]
        pins = dict(one.split("==") for name in ("vllm", "sglang") for one in extras[name])
        assert pins == dict(PROVEN)

    def test_ucx_on_every_network_is_noted(self) -> None:
        assert not any("UCX" in one.text for one in machine())
        notes = [one for one in machine(environ={"A": "b"}) if "UCX" in one.text]
        assert [one.level for one in notes] == [Level.NOTE]

    def test_shared_memory_that_is_not_there(self, tmp_path: Path) -> None:
        (found,) = problems(machine(shm=tmp_path / "none"))
        assert "No such file" in found

    @pytest.mark.parametrize(
        ("blocks", "free", "says"),
        [(1 << 14, 1 << 14, "has 64 MB, 0 MB"), (1 << 20, 1 << 15, "has 4,096 MB, 3,968 MB")],
    )
    def test_shared_memory_that_is_small_or_full(
        self, monkeypatch: pytest.MonkeyPatch, blocks: int, free: int, says: str
    ) -> None:
        class Stat:
            f_frsize, f_blocks, f_bavail = 4096, blocks, free

        monkeypatch.setattr(environment_module.os, "statvfs", lambda _path: Stat)
        (found,) = problems(machine())
        assert says in found

    def test_huge_pages_are_counted(self, tmp_path: Path) -> None:
        meminfo = tmp_path / "meminfo"
        meminfo.write_text(
            "HugePages_Total:      8\nHugePages_Free:       5\nHugepagesize:    2048 kB\n"
        )
        texts = [one.text for one in machine(meminfo=meminfo)]
        assert "huge pages: 5 of 8 free, 2048 kB each" in texts

    def test_a_system_port_that_is_taken(self) -> None:
        pytest.importorskip("dynamo.common.backend")
        environ = {"DYN_SYSTEM_HOST": "127.0.0.1", "UCX_NET_DEVICES": "lo"}
        with socket.socket() as taken:
            port = free_port()
            taken.bind(("127.0.0.1", port))
            taken.listen()
            (found,) = problems(machine(environ={**environ, "DYN_SYSTEM_PORT": str(port)}))
        assert f"system port {port} on 127.0.0.1 cannot be had" in found
        (found,) = problems(machine(environ={**environ, "DYN_SYSTEM_PORT": "40000"}))
        assert "takes ports from 1 to 32767" in found

    def test_a_python_that_is_too_old(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "version_info", (3, 10, 9, "final", 0))
        (found,) = problems(machine())
        assert found.startswith("Python 3.10.9")


def card(**changes: Any) -> WorkerCard:
    ours: dict[str, Any] = {
        "package_version": "0.1.0",
        "engine_version": "0.31.0",
        "transports": ("arena", "shm", "nixl"),
        "host_id": "here",
        "modalities": ("image",),
    }
    return WorkerCard("vllm", **{**ours, **changes})


def seen(worker: str, card: WorkerCard | None = None, **changes: Any) -> SeenWorker:
    known: dict[str, Any] = {"block_size": 32, "checksums": ("c",), "system_url": "http://x"}
    return SeenWorker(worker, "tiny", card=card, **{**known, **changes})


def look(*workers: SeenWorker, usable: tuple[str, ...] = ("arena", "shm")) -> list[Finding]:
    return deployment(workers, host_id="here", usable=usable)


class TestDeployment:
    def test_workers_that_agree(self) -> None:
        findings = look(seen("a", card()), seen("b", card()))
        assert problems(findings) == []
        assert exit_status(findings) == 0
        assert [one.text for one in findings if one.area == "transports"] == [
            f"from here to {worker} (this host): arena; it also takes nixl, which cannot be used "
            "here"
            for worker in "ab"
        ]

    @pytest.mark.parametrize(
        ("other", "says"),
        [
            (seen("b", card(mm_hash_mode=HashMode.BLOCK_MM_INFOS)),
             "disagree on mm_hash_mode: a says pad_value; b says block_mm_infos"),
            (seen("b", card(mm_hash_hex_chars=64)), "on mm_hash_hex_chars: a says 16; b says 64"),
            (seen("b", card(modalities=("image", "video"))),
             "on modalities: a says image; b says image+video"),
            (seen("b", WorkerCard("sglang")), "on backend_framework: a says vllm; b says sglang"),
            (seen("b", WorkerCard("vllm")), "whether it is dynamo-worker-ext"),
            (seen("b", card(), block_size=16), "the size of a block: a says 32; b says 16"),
            (seen("b", card(), checksums=("d",)), "the model's files"),
        ],
    )  # fmt: skip
    def test_workers_that_do_not(self, other: SeenWorker, says: str) -> None:
        findings = look(seen("a", card()), other)
        assert exit_status(findings) == 1
        assert any(says in one for one in problems(findings))

    def test_workers_of_different_models_need_not_agree(self) -> None:
        other = SeenWorker("b", "another", 16, ("d",), "http://y", card())
        assert problems(look(seen("a", card()), other)) == []

    def test_different_versions_are_noted(self) -> None:
        findings = look(seen("a", card()), seen("b", card(engine_version="0.31.1")))
        assert problems(findings) == []
        assert any("disagree on engine_version" in one.text for one in findings)

    def test_a_worker_that_does_not_name_its_framework(self) -> None:
        raw = json.dumps({"display_name": "tiny", "runtime_config": {"runtime_data": {}}})
        (found,) = problems(look(SeenWorker.of("255", raw)))
        assert "the card of worker ff does not say backend_framework" in found

    def test_a_mode_that_its_engine_or_this_dynamo_does_not_speak(self) -> None:
        mode = HashMode.BLOCK_MM_INFOS
        assert any("knows only pad_value" in one for one in problems(
            look(seen("a", WorkerCard("sglang", mm_hash_mode=mode)))))  # fmt: skip
        assert any("block_mm_infos" in one for one in problems(
            look(seen("a", card(mm_hash_mode=mode)))))  # fmt: skip

    def test_an_engine_that_does_not_take_hashes_is_noted(self) -> None:
        plain = card(mm_routing="text_prefix", mm_hash_support="not accepted")
        findings = look(seen("a", plain), seen("b", plain))
        assert problems(findings) == []
        notes = [one for one in findings if one.level is Level.NOTE and one.area == "workers"]
        assert len(notes) == 2
        assert all(one.text.endswith("not accepted") for one in notes)
        assert exit_status(look(seen("a", plain), seen("b", card()))) == 1

    @pytest.mark.parametrize(
        ("changes", "usable", "says", "advice"),
        [
            ({"host_id": "there"}, ("arena", "shm", "nixl"), "(another host): nixl", ""),
            ({"host_id": "there"}, ("arena", "shm"), "(another host): none reaches it",
             "install nixl on both sides"),
            ({"transports": ()}, ("arena", "shm"), "it takes nothing", "--mm-transfer off"),
            ({"transports": ("shm",)}, ("arena", "shm"), "(this host): shm", ""),
        ],
    )  # fmt: skip
    def test_what_reaches_a_worker(
        self, changes: dict[str, Any], usable: tuple[str, ...], says: str, advice: str
    ) -> None:
        findings = look(seen("a", card(**changes)), usable=usable)
        (reach,) = (one for one in findings if one.area == "transports")
        assert says in reach.text
        assert advice in reach.advice
        assert problems(findings) == []

    def test_nobody_there(self) -> None:
        assert problems(look()) == ["discovery has none"]


class TestCards:
    RAW: Mapping[str, Any] = {
        "display_name": "tiny",
        "kv_cache_block_size": 32,
        "model_info": {"hf": {"path": "http://127.0.0.1:81/v1/x.json", "checksum": "blake3:1"}},
        "tokenizer": {"hf": {"path": "http://127.0.0.1:81/v1/y.json", "checksum": "blake3:2"}},
        "runtime_config": {"runtime_data": {"backend_framework": "vllm"}},
    }

    def test_where_its_metrics_are_is_read_from_its_files(self) -> None:
        found = SeenWorker.of("16", json.dumps(self.RAW))
        assert found == SeenWorker(
            "10", "tiny", 32, ("blake3:1", "blake3:2"), "http://127.0.0.1:81", WorkerCard("vllm")
        )

    def test_local_files_are_noted(self) -> None:
        raw = json.loads(json.dumps(self.RAW).replace("http://127.0.0.1:81", "/models"))
        found = SeenWorker.of("16", json.dumps(raw))
        assert found.system_url == ""
        assert any("its card names local files" in one.text for one in look(found))

    @pytest.mark.parametrize("raw", ["", "[]", "{", '{"runtime_config": 3}', '{"model_info": [1]}'])
    def test_malformed_cards_are_findings(self, raw: str) -> None:
        found = SeenWorker.of("w", raw)
        assert found.card is None
        assert problems(look(found))


@contextmanager
def server(pages: Mapping[str, Any]) -> Iterator[str]:
    """Answers on loopback: a page, or a function of the request's body."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(None)

        def do_POST(self) -> None:
            self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def answer(self, body: Any) -> None:
            page = pages.get(self.path, (404, "no such page"))
            status, text = page(body) if callable(page) else page
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: Any) -> None:
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{httpd.server_port}"
    finally:
        httpd.shutdown()
        thread.join()
        httpd.server_close()


class Deployment:
    """A frontend and a worker's metrics in one server."""

    def __init__(self, outcome: str = "received", image_tokens: int = 4, status: int = 200) -> None:
        self.outcome, self.image_tokens, self.status = outcome, image_tokens, status
        self.counts: Counter[str] = Counter(text=3)

    def chat(self, body: Any) -> tuple[int, str]:
        has_image = any(one["type"] == "image_url" for one in body["messages"][0]["content"])
        self.counts[self.outcome if has_image else "text"] += 1
        usage = {"prompt_tokens": 10 + self.image_tokens * has_image}
        return self.status, json.dumps({"usage": usage})

    def metrics(self, _body: Any) -> tuple[int, str]:
        name = "dynamo_worker_ext_requests"
        lines = [f"# TYPE {name} counter"]
        lines += [f'{name}_total{{outcome="{k}"}} {v}' for k, v in self.counts.items()]
        return 200, "\n".join(lines) + "\n"

    def probe(self, *, metrics: bool = True) -> list[Finding]:
        pages = {
            "/v1/models": (200, json.dumps({"data": [{"id": "tiny"}]})),
            "/v1/chat/completions": self.chat,
            "/metrics": self.metrics,
        }
        with server(pages) as url:
            return probe(url, model=None, system_urls=[url] if metrics else [], timeout=10)


class TestProbe:
    @pytest.mark.parametrize("outcome", ["received", "raw", "hit"])
    def test_an_image_that_arrives(self, outcome: str) -> None:
        findings = Deployment(outcome).probe()
        assert problems(findings) == []
        assert findings[0].text == "an image adds 4 tokens to a prompt"
        assert findings[1].text.startswith(f"outcome {outcome!r}: ")

    @pytest.mark.parametrize("outcome", ["reprocessed", "lost", "text"])
    def test_an_image_that_does_not_arrive_as_it_should(self, outcome: str) -> None:
        assert any(f"outcome {outcome!r}" in one for one in problems(Deployment(outcome).probe()))

    def test_an_image_that_makes_no_difference_is_lost(self) -> None:
        (found,) = problems(Deployment(image_tokens=0).probe())
        assert "10 tokens with an image and 10 without: it got lost" in found

    def test_an_error_is_shown(self) -> None:
        (found,) = problems(Deployment(status=503).probe())
        assert "answered with 503" in found

    def test_without_metrics_the_outcome_is_not_known(self) -> None:
        findings = Deployment().probe(metrics=False)
        assert problems(findings) == []
        assert "its outcome is not known" in findings[-1].text

    def test_a_worker_that_counts_nothing_is_not_taken_for_one_that_does(self) -> None:
        deployment = Deployment()
        deployment.metrics = lambda _body: (200, "")  # type: ignore[method-assign]
        assert "outcomes counted meanwhile: none" in deployment.probe()[-1].text

    def test_nobody_answers(self) -> None:
        with server({}) as url:
            (found,) = problems(probe(url, model=None, system_urls=[], timeout=5))
        assert "/v1/models answered 404" in found
        (found,) = problems(probe("file:///etc", model=None, system_urls=[], timeout=5))
        assert "is no http URL" in found

    def test_its_picture_is_one(self) -> None:
        image = pytest.importorskip("PIL.Image")
        import io

        with image.open(io.BytesIO(tiny_png())) as picture:
            assert picture.size == (56, 56)
            assert len(picture.getcolors()) == 1
        assert tiny_png() != tiny_png()


class TestCommand:
    FOUND = (
        Finding.ok("environment", "fine"),
        Finding.problem("workers", "broken", "mend it"),
    )

    def test_text_has_an_advice_below_each_problem(self) -> None:
        assert as_text(self.FOUND).splitlines() == [
            "environment", "  ok       fine", "", "workers", "  problem  broken",
            "           -> mend it", "", "1 problem",
        ]  # fmt: skip
        assert as_text(self.FOUND[:1]).endswith("nothing is wrong")

    def test_json_says_the_same(self) -> None:
        found = json.loads(as_json(self.FOUND))
        assert not found["healthy"]
        assert found["findings"][1] == {
            "level": "problem", "area": "workers", "text": "broken", "advice": "mend it",
        }  # fmt: skip

    @pytest.mark.parametrize("findings", [FOUND, FOUND[:1]])
    def test_the_exit_status_is_1_if_something_is_wrong(
        self,
        findings: tuple[Finding, ...],
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        from dynamo_worker_ext.doctor import __main__ as command

        monkeypatch.setattr(command, "environment", lambda: list(findings))
        assert main(["--json"]) == len(findings) - 1
        assert json.loads(capsys.readouterr().out)["healthy"] == (len(findings) == 1)

    @pytest.mark.parametrize("argv", [["--endpoint", "a.b"], ["--timeout", "0"], ["--what"]])
    def test_wrong_usage_is_2(self, argv: list[str]) -> None:
        with pytest.raises(SystemExit) as caught:
            main(argv)
        assert caught.value.code == 2
