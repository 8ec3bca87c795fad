"""A small engine with three files and patches for it, for tests of the tool itself."""

from __future__ import annotations

import difflib
import hashlib
from dataclasses import dataclass
from pathlib import Path

BEFORE = {
    "sglang/one.py": "".join(f"line {n}\n" for n in range(1, 21)),
    "sglang/two.py": "alpha\nbeta\ngamma\n",
    "sglang/deep/three.py": "def answer():\n    return 41\n",
}
AFTER = {
    "sglang/one.py": BEFORE["sglang/one.py"].replace("line 3\n", "").replace("line 17", "LINE 17"),
    "sglang/two.py": "alpha\nbeta\nbetween\ngamma\n",
    "sglang/deep/three.py": "def answer():\n    return 42\n",
}
PATCHES = {
    "first": ["sglang/one.py", "sglang/two.py"],
    "second": ["sglang/deep/three.py"],
}
VERSION = "1.0.post1"


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def diff(path: str, context: int = 1) -> str:
    before, after = (side[path].splitlines(keepends=True) for side in (BEFORE, AFTER))
    return "".join(difflib.unified_diff(before, after, f"a/{path}", f"b/{path}", n=context))


@dataclass(frozen=True)
class Small:
    """What a test is given.

    Attributes:
        root: site-packages.
        patches: the directory of the patches.
    """

    root: Path
    patches: Path

    @property
    def manifest(self) -> Path:
        return self.patches / "sglang" / VERSION / "manifest.toml"

    def snapshot(self) -> dict[str, bytes]:
        """Every file below site-packages, but for what Python compiles."""
        return {
            str(path.relative_to(self.root)): path.read_bytes()
            for path in sorted(self.root.rglob("*"))
            if path.is_file() and path.suffix != ".pyc"
        }

    def texts(self) -> dict[str, str]:
        return {path: (self.root / path).read_text() for path in BEFORE}

    def write(self, texts: dict[str, str], *paths: str) -> None:
        for path in paths or texts:
            (self.root / path).write_text(texts[path])


def make_tree(root: Path, version: str = VERSION, name: str = "sglang") -> None:
    """An installed engine."""
    for path, text in {**BEFORE, "sglang/__init__.py": "raise ImportError('never')\n"}.items():
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    info = root / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def make_patches(directory: Path) -> None:
    """The patches of that engine."""
    folder = directory / "sglang" / VERSION
    folder.mkdir(parents=True)
    lines = ['engine = "sglang"', f'versions = ["{VERSION}", "1.1"]']
    for name, paths in PATCHES.items():
        lines += ["[[patches]]", f'name = "{name}"', 'why = "w"', 'changes = "c"']
        lines += ['why_a_patch = "p"', f'checks = ["{name}"]']
        for path in paths:
            lines += ["[[patches.files]]", f'path = "{path}"']
            lines += [f'before = "{sha256(BEFORE[path])}"', f'after = "{sha256(AFTER[path])}"']
        (folder / f"{name}.patch").write_text("".join(map(diff, paths)))
    lines += ["[[patches]]", 'name = "third"', 'state = "already-upstream"', 'why = "merged"']
    (folder / "manifest.toml").write_text("\n".join(lines) + "\n")
    other = directory / "sglang" / "2.0"
    other.mkdir()
    (other / "manifest.toml").write_text(
        'engine = "sglang"\nversions = ["2.0"]\n'
        '[[patches]]\nname = "first"\nstate = "not-needed"\nwhy = "rewritten"\n'
    )
