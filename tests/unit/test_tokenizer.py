"""Tokenisers: text survives the round trip, ids stay below the vocabulary, a bad file is one clear line."""

from __future__ import annotations

import base64
import importlib.util
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from k3_audit.artifact.artifact import sha256
from k3_audit.audit.tokenizer import (
    ByteTokenizer,
    TiktokenTokenizer,
    TokenizerError,
    load_tokenizer,
    parse_ranks,
)

pytestmark = pytest.mark.unit
BYTES = ByteTokenizer()
needs_tiktoken = pytest.mark.skipif(
    importlib.util.find_spec("tiktoken") is None, reason="the optional library tiktoken is not installed"
)


def ranks_file(*merged: bytes) -> bytes:
    """A tiktoken.model with the 256 single bytes and then the given tokens."""
    tokens = [bytes([b]) for b in range(256)] + list(merged)
    return b"".join(base64.b64encode(t) + b" %d\n" % i for i, t in enumerate(tokens))


@given(st.text())
def test_bytes_round_trip(text: str) -> None:
    ids = BYTES.encode(text)
    assert BYTES.decode(ids) == text
    assert ids.dtype == np.int64 and len(ids) == len(text.encode())
    assert ((ids >= 0) & (ids < BYTES.bos_id)).all()


def test_byte_specials_stay_out_of_text() -> None:
    assert sorted((BYTES.bos_id, BYTES.eos_id, BYTES.pad_id)) == [256, 257, 258]
    assert BYTES.vocab_size == 259
    assert BYTES.decode([256, *b"ok", 257, 258]) == "ok"
    assert BYTES.decode(BYTES.encode("中")[:2]) == "\ufffd", "a cut character is visible, not an exception"


def test_default_is_bytes() -> None:
    assert load_tokenizer().name == "bytes"


@needs_tiktoken
def test_tiktoken_uses_the_merges_of_the_file(tmp_path: Path) -> None:
    data = ranks_file(b"he", b"ll", b"hell", b"hello", b" w")
    path = tmp_path / "tiktoken.model"
    path.write_bytes(data)
    tokenizer = load_tokenizer(path)
    assert tokenizer.encode("hello w").tolist() == [259, 260]
    assert tokenizer.encode("hello w").dtype == np.int64
    assert tokenizer.sha256 == sha256(data)
    assert (tokenizer.bos_id, tokenizer.vocab_size) == (261, 261 + 256)
    assert tokenizer.decode([261, 259, 260]) == "hello w"


@needs_tiktoken
def test_tiktoken_splits_as_the_release_does(tmp_path: Path) -> None:
    """Merges never cross the release's cuts: between Han and Latin, between groups of three digits."""
    path = tmp_path / "tiktoken.model"
    path.write_bytes(ranks_file(b"12", b"34", b"123", b"1234", "中a".encode(), "中"[0:1].encode()))
    tokenizer = TiktokenTokenizer(path)
    pieces = [tokenizer.decode([i]) for i in tokenizer.encode("12345")]
    assert pieces == ["123", "4", "5"], "digits are cut by three before merging"
    assert 260 not in tokenizer.encode("中a"), "a Han run is cut from Latin before merging"


@needs_tiktoken
@given(st.text())
def test_tiktoken_round_trip(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "round-trip.model"
    if not path.exists():
        path.write_bytes(ranks_file(b"th", b"the", b"  ", "中".encode()))
    tokenizer = TiktokenTokenizer(path)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_missing_library_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tiktoken.model"
    path.write_bytes(ranks_file())
    monkeypatch.setitem(__import__("sys").modules, "tiktoken", None)
    with pytest.raises(TokenizerError, match=r"pip install 'k3-audit\[tokenizer\]'"):
        TiktokenTokenizer(path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"{}\n", "line 1: not a tiktoken.model file"),
        (b"AA== 0\n!! 1\n", "line 2: not a tiktoken.model file"),
        (b"AA== zero\n", "line 1: not a tiktoken.model file"),
        (ranks_file()[: ranks_file().index(b" 200\n") + 5], "single bytes are missing"),
        (ranks_file().replace(b" 7\n", b" 8\n"), "ranks are not 0..n-1"),
        (b"", "single bytes are missing"),
    ],
)
def test_bad_rank_files_are_named(data: bytes, message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        parse_ranks(data, "x.model")


def test_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="cannot read the tokeniser") as error:
        load_tokenizer(tmp_path / "none.model")
    assert "\n" not in str(error.value)
