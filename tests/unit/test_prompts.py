"""Prompts: the manifest is well formed, nothing unchecked enters the cache, needles are where they say."""

from __future__ import annotations

import gzip
import io
import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from k3_audit.artifact.artifact import sha256
from k3_audit.audit import prompts
from k3_audit.audit.prompts import Needle, Prompt, PromptError, Source
from k3_audit.audit.tokenizer import ByteTokenizer

pytestmark = pytest.mark.unit
BYTES = ByteTokenizer()
LENGTHS = (4096, 32768, 131072, 262144)


# -- the manifest that we ship


def test_every_prompt_reaches_256k_byte_tokens() -> None:
    for prompt in prompts.load_manifest():
        assert prompt.tokens + 1 >= LENGTHS[-1], prompt.id


def test_the_required_kinds_of_text_are_there() -> None:
    ids = {p.id for p in prompts.load_manifest()}
    assert {"cpython-lib", "jargon-file", "docutils-docs", "agent-log", "chinese-code"} <= ids
    assert {n.haystack for n in prompts.load_needles()} <= ids
    assert len({n.depth for n in prompts.load_needles()}) >= 3


def test_all_texts_are_small_enough_to_carry() -> None:
    assert sum(p.tokens for p in prompts.load_manifest()) < 20e6


def test_every_source_names_its_licence_and_no_host() -> None:
    text = prompts.MANIFEST.read_text()
    assert "://" not in text
    for prompt in prompts.load_manifest():
        assert prompt.why and all(s.licence for s in prompt.sources)


# -- manifests in general

ENTRY = """
[[prompt]]
id = "one"
what = "w"
why = "y"
characters = [{start}, {stop}]
tokens = {tokens}
sha256 = "{sha}"
[[prompt.source]]
kind = "pypi"
name = "p"
version = "1"
file = "p-1-py3-none-any.whl"
sha256 = "{sha}"
members = ["p/*"]
licence = "MIT"
"""


def manifest(folder: Path, start: int = 0, stop: int = 10, tokens: int = 10, sha: str = "0" * 64) -> Path:
    path = folder / "prompts.toml"
    path.write_text(ENTRY.format(start=start, stop=stop, tokens=tokens, sha=sha))
    return path


@given(start=st.integers(-3, 50), stop=st.integers(-3, 50), tokens=st.integers(-1, 250))
def test_slices(tmp_path_factory: pytest.TempPathFactory, start: int, stop: int, tokens: int) -> None:
    """A manifest loads exactly when its slice is one, and could have that many UTF-8 bytes."""
    path = manifest(tmp_path_factory.getbasetemp(), start, stop, tokens)
    possible = 0 <= start < stop and stop - start <= tokens <= 4 * (stop - start)
    try:
        (prompt,) = prompts.load_manifest(path)
    except PromptError:
        assert not possible
    else:
        assert possible and prompt.characters == (start, stop)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('id = "one"', 'id = "One/.."', "an id is lower-case words"),
        ('why = "y"', "", "why must be a string"),
        ("tokens = 10", "tokens = 10.0", "tokens must be a whole number"),
        ("characters = [0, 10]", "characters = [0, true]", "characters must be"),
        (f'sha256 = "{"0" * 64}"', 'sha256 = "12"', "64 hexadecimal digits"),
        ('kind = "pypi"', 'kind = "http"', "kind must be 'pypi' or 'debian'"),
        ("none-any.whl", "cp311-manylinux.whl", "same bytes on every machine"),
        ('members = ["p/*"]', "members = []", "members must name at least one"),
        ('licence = "MIT"', "", "licence must be a string"),
        ('licence = "MIT"', 'licence = "MIT"\nsha512 = "x"', "unknown field 'sha512'"),
        ("[[prompt]]", "[[prompt]", "is not TOML"),
        ('id = "one"', 'id = "one"\nsource = 3', "is not TOML"),
    ],
)
def test_manifest_defects_are_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = manifest(tmp_path)
    assert len(prompts.load_manifest(path)) == 1
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(PromptError, match=message) as error:
        prompts.load_manifest(path)
    assert str(path) in str(error.value)


def test_duplicate_ids_and_unknown_haystacks_are_named(tmp_path: Path) -> None:
    path = manifest(tmp_path)
    needle = '[[needle]]\nid = "n"\nhaystack = "{}"\ndepth = {}\nseed = 1\n'
    text = path.read_text()
    path.write_text(text + needle.format("one", 0.5))
    assert prompts.load_needles(path) == [Needle("n", "one", 0.5, 1)]
    for bad, message in (
        (needle.format("two", 0.5), "no prompt is called 'two'"),
        (needle.format("one", 1.5), "depth"),
    ):
        path.write_text(text + bad)
        with pytest.raises(PromptError, match=message):
            prompts.load_needles(path)
    path.write_text(text + text)
    with pytest.raises(PromptError, match="two of the"):
        prompts.load_manifest(path)
    with pytest.raises(PromptError, match="cannot read"):
        prompts.load_manifest(tmp_path / "none.toml")


# -- fetching, from package clients that look into a local folder


def wheel(files: dict[str, bytes], name: str = "k3_fake", version: str = "1.0") -> bytes:
    """A pure wheel that pip accepts."""
    info = f"{name}-{version}.dist-info"
    meta = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nRequires-Python: >=3.99\n"
    described = {
        f"{info}/METADATA": meta.encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as z:
        for member, content in {**files, **described}.items():
            z.writestr(member, content)
    return data.getvalue()


def deb(files: dict[str, bytes]) -> bytes:
    """The parts of a Debian package that hold files: `ar` with a compressed tar inside."""
    inner = io.BytesIO()
    with tarfile.open(fileobj=inner, mode="w:xz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(f"./{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    out = b"!<arch>\n"
    for name, content in {"debian-binary": b"2.0\n", "odd": b"x", "data.tar.xz": inner.getvalue()}.items():
        header = f"{name:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(content):<10}`\n"
        out += header.encode() + content + b"\n" * (len(content) % 2)
    return out


def prompt_of(data: bytes, text: str, members: tuple[str, ...], kind: str = "pypi") -> Prompt:
    """The manifest entry of a distribution whose members, joined, are `text`."""
    file = "k3_fake-1.0-py3-none-any.whl" if kind == "pypi" else "k3-fake_1.0_all.deb"
    source = Source(kind, "k3-fake", "1.0", file, sha256(data), members, "MIT")
    return Prompt("fake", "w", "y", (source,), (0, len(text)), sha256(text), len(text.encode()))


TEXT = "=== k3_fake/a.py ===\n第一\n\n=== k3_fake/b.py ===\nsecond\n\n"
FILES = {"k3_fake/b.py": b"second\n", "k3_fake/a.py": "第一\n".encode(), "k3_fake/c.bin": b"\xff"}


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip may look into this folder only."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return folder


def place(cache: Path, prompt: Prompt, data: bytes) -> None:
    """Put the distribution where a person would, so that no client is asked."""
    (cache / "downloads").mkdir(parents=True, exist_ok=True)
    (cache / "downloads" / prompt.sources[0].file).write_bytes(data)


def left_in(cache: Path) -> list[str]:
    return sorted(str(p.relative_to(cache)) for p in cache.rglob("*") if p.is_file())


def test_fetch_through_pip_then_from_the_cache(offline: Path, tmp_path: Path) -> None:
    data = wheel(FILES)
    prompt = prompt_of(data, TEXT, ("k3_fake/*.py",))
    (offline / prompt.sources[0].file).write_bytes(data)
    cache = tmp_path / "cache"
    assert prompts.fetch(prompt, cache) == TEXT
    assert left_in(cache) == [f"downloads/{prompt.sources[0].file}", prompt.file]
    shutil.rmtree(offline)
    shutil.rmtree(cache / "downloads")
    assert prompts.fetch(prompt, cache) == TEXT, "a cached text needs no source"


def test_a_file_put_by_hand_is_used(tmp_path: Path) -> None:
    data = wheel(FILES)
    prompt = prompt_of(data, TEXT, ("k3_fake/*.py",))
    place(tmp_path, prompt, data)
    assert prompts.fetch(prompt, tmp_path) == TEXT
    place(tmp_path, prompt, data[:-1])
    (tmp_path / prompt.file).unlink()
    with pytest.raises(PromptError, match=r"delete .*k3_fake-1.0-py3-none-any.whl and try again"):
        prompts.fetch(prompt, tmp_path)


def test_slice_is_of_characters(tmp_path: Path) -> None:
    data = wheel(FILES)
    start = TEXT.index("一")
    part = TEXT[start : start + 5]
    prompt = replace(prompt_of(data, part, ("k3_fake/*.py",)), characters=(start, start + 5))
    place(tmp_path, prompt, data)
    assert prompts.fetch(prompt, tmp_path) == part


def test_another_distribution_is_refused_and_not_kept(offline: Path, tmp_path: Path) -> None:
    data, other = wheel(FILES), wheel({**FILES, "k3_fake/a.py": b"changed\n"})
    prompt = prompt_of(data, TEXT, ("k3_fake/*.py",))
    (offline / prompt.sources[0].file).write_bytes(other)
    with pytest.raises(PromptError, match=f"sha256 {sha256(other)}, the manifest says {sha256(data)}"):
        prompts.fetch(prompt, tmp_path / "cache")
    assert not (tmp_path / "cache").exists() or left_in(tmp_path / "cache") == []


def test_another_text_is_refused_and_not_kept(tmp_path: Path) -> None:
    data = wheel(FILES)
    prompt = replace(prompt_of(data, TEXT, ("k3_fake/*.py",)), sha256=sha256("another text"))
    place(tmp_path, prompt, data)
    with pytest.raises(PromptError, match=f"it has sha256 {sha256(TEXT)}"):
        prompts.fetch(prompt, tmp_path)
    assert left_in(tmp_path) == [f"downloads/{prompt.sources[0].file}"]


def test_a_length_that_is_not_the_texts_is_refused(tmp_path: Path) -> None:
    data = wheel(FILES)
    right = prompt_of(data, TEXT, ("k3_fake/*.py",))
    place(tmp_path, right, data)
    for wrong in (
        replace(right, tokens=right.tokens + 1),
        replace(right, characters=(0, len(TEXT) + 1)),
    ):
        with pytest.raises(PromptError, match=rf"{right.tokens} tokens, characters \[0, {len(TEXT)}\]"):
            prompts.fetch(wrong, tmp_path)
    assert prompts.fetch(right, tmp_path) == TEXT


def test_a_damaged_cache_file_is_fetched_again(tmp_path: Path) -> None:
    data = wheel(FILES)
    prompt = prompt_of(data, TEXT, ("k3_fake/*.py",))
    place(tmp_path, prompt, data)
    prompts.fetch(prompt, tmp_path)
    good = (tmp_path / prompt.file).read_bytes()
    for damaged in (good[: len(good) // 2], prompts._packed("another text"), b""):
        (tmp_path / prompt.file).write_bytes(damaged)
        assert prompts.fetch(prompt, tmp_path) == TEXT
        assert (tmp_path / prompt.file).read_bytes() == good


@pytest.mark.parametrize(
    ("members", "message"),
    [
        (("k3_fake/none*",), "has no member k3_fake/none"),
        (("k3_fake/*.bin",), "is not UTF-8 text"),
        (("k3_fake/a.py!x",), "cannot be unpacked"),
    ],
)
def test_member_defects_are_named(tmp_path: Path, members: tuple[str, ...], message: str) -> None:
    data = wheel(FILES)
    prompt = prompt_of(data, TEXT, members)
    place(tmp_path, prompt, data)
    with pytest.raises(PromptError, match=message):
        prompts.fetch(prompt, tmp_path)


def test_offline_says_what_to_run_and_where_to_put_it(offline: Path, tmp_path: Path) -> None:
    prompt = prompt_of(wheel(FILES), TEXT, ("k3_fake/*.py",))
    with pytest.raises(PromptError) as error:
        prompts.fetch(prompt, tmp_path / "cache")
    message = str(error.value)
    assert "\n" not in message
    assert "pip download" in message and "k3-fake==1.0" in message
    assert str(tmp_path / "cache" / "downloads") in message


def test_fetch_all_tries_all_before_it_complains(offline: Path, tmp_path: Path) -> None:
    data = wheel(FILES)
    there = prompt_of(data, TEXT, ("k3_fake/*.py",))
    gone = replace(
        there, id="gone", sources=(replace(there.sources[0], name="k3-gone", file="x-none-any.whl"),)
    )
    place(tmp_path / "cache", there, data)
    with pytest.raises(PromptError, match=r"1 of 2 prompts .* gone: "):
        prompts.fetch_all([gone, there], tmp_path / "cache")
    assert there.file in left_in(tmp_path / "cache")


def fake_apt(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir(exist_ok=True)
    program = folder / "apt-get"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_fetch_through_apt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "=== usr/share/doc/k3/t.txt.gz ===\nwords\n\n"
    data = deb({"usr/share/doc/k3/t.txt.gz": gzip.compress(b"words\n"), "usr/share/doc/k3/other": b"no"})
    (tmp_path / "package").write_bytes(data)
    prompt = prompt_of(data, text, ("usr/share/doc/k3/*.gz",), "debian")
    script = f'test "$*" = "download k3-fake=1.0" && cp {tmp_path}/package k3-fake_1.0_all.deb'
    fake_apt(tmp_path / "bin", script, monkeypatch)
    assert prompts.fetch(prompt, tmp_path / "cache") == text


def test_no_apt_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = prompt_of(b"", TEXT, ("*",), "debian")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        PromptError, match="there is no apt-get here; run `apt-get update && apt-get download"
    ):
        prompts.fetch(prompt, tmp_path / "cache")


def test_a_broken_deb_is_one_line(tmp_path: Path) -> None:
    whole = deb({"a": random.Random(0).randbytes(2000)})
    for data in (whole[:-500], whole.replace(b"data.tar", b"last.tar"), b"!<arch>\n" + b"x" * 90):
        with pytest.raises(PromptError, match="cannot be unpacked"):
            prompts._members(data, "x.deb", "*")


def test_a_killed_download_leaves_nothing_behind(tmp_path: Path) -> None:
    """SIGKILL while apt has written half of the file: no file of that name exists in the cache afterwards."""
    data = deb({"a": b"words\n" * 1000})
    (tmp_path / "half").write_bytes(data[: len(data) // 2])
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "apt-get").write_text(
        f"#!/bin/sh\ncp {tmp_path}/half k3-fake_1.0_all.deb\ntouch {tmp_path}/started\nexec sleep 30\n"
    )
    (folder / "apt-get").chmod(0o755)
    code = (
        "import sys; from k3_audit.audit.prompts import *\n"
        f"s = Source('debian', 'k3-fake', '1.0', 'k3-fake_1.0_all.deb', {sha256(data)!r}, ('a',), 'MIT')\n"
        f"fetch(Prompt('fake', 'w', 'y', (s,), (0, 9), '0' * 64, 9), {str(tmp_path / 'cache')!r})\n"
    )
    env = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "TMPDIR": str(tmp_path)}
    process = subprocess.Popen([sys.executable, "-c", code], env=env, start_new_session=True)
    deadline = time.monotonic() + 30
    while not (tmp_path / "started").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert (tmp_path / "started").exists()
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "cache").exists() or left_in(tmp_path / "cache") == []


def test_export_and_import_carry_the_texts(tmp_path: Path) -> None:
    data = wheel(FILES)
    prompt = prompt_of(data, TEXT, ("k3_fake/*.py",))
    place(tmp_path / "here", prompt, data)
    (carried,) = prompts.export([prompt], tmp_path / "carried", tmp_path / "here")
    assert left_in(tmp_path / "carried") == [prompt.file]
    shutil.rmtree(tmp_path / "here")
    assert prompts.import_([prompt], tmp_path / "carried", tmp_path / "there") == [prompt]
    assert prompts.fetch(prompt, tmp_path / "there") == TEXT
    assert prompts.fetch(prompt, tmp_path / "carried") == TEXT, "the folder itself is a cache"
    carried.write_bytes(carried.read_bytes()[:-9])
    with pytest.raises(PromptError, match="damaged"):
        prompts.import_([prompt], tmp_path / "carried", tmp_path / "elsewhere")
    carried.unlink()
    with pytest.raises(PromptError, match="has none of the prompts"):
        prompts.import_([prompt], tmp_path / "carried", tmp_path / "elsewhere")


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(prompts.CACHE_ENV, str(tmp_path))
    assert prompts.default_cache() == tmp_path
    monkeypatch.delenv(prompts.CACHE_ENV)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert prompts.default_cache() == tmp_path / ".cache" / "k3-audit" / "prompts"


def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(prompts.CACHE_ENV, str(tmp_path / "cache"))
    listed = CliRunner().invoke(prompts.commands, ["list"])
    assert listed.exit_code == 0 and "cpython-lib" in listed.output
    refused = CliRunner().invoke(prompts.commands, ["fetch", "nonsense"])
    assert isinstance(refused.exception, PromptError), "for the command line to show in one line"
    assert "no prompt is called 'nonsense'" in str(refused.exception)


def test_real_fetch_of_the_smallest_source(tmp_path: Path) -> None:
    """The ordinary pip of this machine brings the bytes that the manifest names."""
    source = next(s for p in prompts.load_manifest() for s in p.sources if s.name == "asyncio")
    try:
        data = prompts._download(source, tmp_path)
    except PromptError as e:
        if "has sha256" in str(e):
            raise
        pytest.skip(f"no package index can be reached: {e}")
    assert "=== asyncio/base_events.py ===" in "".join(prompts._texts(source, data))


# -- tokens and needles


@pytest.fixture
def cached(tmp_path: Path) -> Prompt:
    text = "".join(f"{i} 行\n" for i in range(3000))
    prompt = prompt_of(b"", text, ("*",))
    (tmp_path / prompt.file).write_bytes(prompts._packed(text))
    return prompt


def test_tokens_are_a_prefix_with_bos(cached: Prompt, tmp_path: Path) -> None:
    ids = prompts.tokens(cached, BYTES, 4096, tmp_path)
    assert ids.shape == (4096,) and ids.dtype == np.int64
    assert ids[0] == BYTES.bos_id
    assert (ids[:100] == prompts.tokens(cached, BYTES, 100, tmp_path)).all()
    assert BYTES.decode(ids[:10]) == "0 行\n1 行"[:7] + "\ufffd" * 0 or BYTES.decode(ids).startswith(
        "0 行\n1 "
    )
    whole = prompts.tokens(cached, BYTES, cached.tokens + 1, tmp_path)
    assert BYTES.decode(whole) == prompts.fetch(cached, tmp_path)


@pytest.mark.parametrize("length", [0, -1, 10**7])
def test_impossible_lengths_are_refused(cached: Prompt, tmp_path: Path, length: int) -> None:
    with pytest.raises(PromptError, match="fake"):
        prompts.tokens(cached, BYTES, length, tmp_path)


HAY = "".join(f"line {i} 中文 é\n" for i in range(2000))


@given(depth=st.floats(0, 1), seed=st.integers(0, 2**32), length=st.integers(250, 30_000))
def test_needle_is_where_it_says(depth: float, seed: int, length: int) -> None:
    built = Needle("n", "h", depth, seed).build(HAY, BYTES, length)
    assert built.ids.shape == (length,) and built.ids[0] == BYTES.bos_id
    assert BYTES.decode(built.ids[built.start : built.stop]).strip() == built.needle
    assert built.answer in built.needle and built.answer not in built.question
    text = BYTES.decode(built.ids)
    assert text.count(built.needle) == 1 and text.endswith(built.question)
    assert "\ufffd" not in BYTES.decode(built.ids[: built.stop]), "no character is cut before the needle"
    room = length - (built.stop - built.start) - len(built.question) - 3
    longest_line = max(map(len, (line.encode() for line in HAY.splitlines()))) + 1
    assert -longest_line - 1 <= (built.start - 1) - depth * room <= 1
    again = Needle("n", "h", depth, seed).build(HAY, BYTES, length)
    assert (again.ids == built.ids).all()


def test_needles_are_pinned() -> None:
    """The same seed means the same needle on every machine and Python version."""
    built = Needle("pin", "h", 0.5, 7).build(HAY, BYTES, 1000)
    assert built.needle == "The registration number of the ivory windmill is 6223819."
    assert BYTES.decode(built.ids[:8]) == "line 0 "


def test_seeds_differ() -> None:
    answers = {Needle("n", "h", 0.5, seed).build(HAY, BYTES, 400).answer for seed in range(50)}
    assert len(answers) == 50


def test_needle_refuses_what_cannot_be() -> None:
    needle = Needle("n", "h", 0.5, 1)
    with pytest.raises(PromptError, match="too few"):
        needle.build(HAY, BYTES, 100)
    with pytest.raises(PromptError, match="haystack h has"):
        needle.build(HAY, BYTES, 10**6)
    with pytest.raises(PromptError, match="already holds the needle"):
        needle.build(HAY + needle.build(HAY, BYTES, 400).needle, BYTES, 400)
    with pytest.raises(PromptError, match="depth"):
        Needle("n", "h", -0.1, 1)
