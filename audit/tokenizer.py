"""Text to token ids: bytes by default, or the model's own BPE from a `tiktoken.model` file that the user has.

The layer's numerics need the statistics of real text more than the release's own ids, so the default needs no
download: one id per UTF-8 byte. Every tokeniser has a sha256, for the evidence.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from k3_audit.artifact.artifact import sha256

RESERVED_SPECIALS = 256
"""Ids after the ranks, all special: 163,584 ranks + 256 make the released vocabulary of 163,840."""

# How the release cuts text before BPE: `pat_str` of tokenization_kimi.py in moonshotai/Kimi-K3, as in K2: Han
# runs alone, words with their contraction, digits by three, punctuation, line ends, blanks. The patterns
# and their order decide every id, so they are the release's own; `&&` is class intersection.
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LEAD, _CONTRACTION = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
SPLIT_PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        f"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTION}",
        f"{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


class TokenizerError(Exception):
    """One line: what is wrong with the tokeniser file, and what to do."""


class Tokenizer(Protocol):
    """What the prompts need of a tokeniser. Special tokens are never produced from text."""

    name: str
    sha256: str
    vocab_size: int
    bos_id: int

    def encode(self, text: str) -> np.ndarray:
        """Ids of `text`, int64 `[n]`, without BOS."""
        ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of `ids`; specials are left out, a cut character becomes U+FFFD."""
        ...


class ByteTokenizer:
    """Ids 0..255 are the bytes of UTF-8; 256 BOS, 257 EOS, 258 padding. A vocabulary of 259 is enough."""

    name = "bytes"
    bos_id, eos_id, pad_id = 256, 257, 258
    vocab_size = 259
    sha256 = sha256("utf-8 bytes 0..255; 256 BOS; 257 EOS; 258 PAD")

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int64)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return bytes(int(i) for i in ids if i < 256).decode("utf-8", errors="replace")


class TiktokenTokenizer:
    """The BPE of a `tiktoken.model` file (a base64 token and its rank on each line), with the release's cuts.

    `sha256` is that of the file. BOS is the first id after the ranks, as in the release (163584). Needs the
    `tiktoken` library: `pip install 'k3-audit[tokenizer]'`.
    """

    def __init__(self, path: str | Path):
        """Raises TokenizerError when `path` is unreadable or no such file, or the library is missing."""
        path = Path(path)
        try:
            data = path.read_bytes()
        except OSError as e:
            raise TokenizerError(f"cannot read the tokeniser {path}: {e.strerror}") from None
        ranks = parse_ranks(data, str(path))
        try:
            import tiktoken
        except ImportError:
            raise TokenizerError(
                f"{path} needs the tiktoken library: pip install 'k3-audit[tokenizer]'; bytes need none"
            ) from None
        self.name = path.name
        self.sha256 = sha256(data)
        self.bos_id, self.eos_id = len(ranks), len(ranks) + 1
        self.vocab_size = len(ranks) + RESERVED_SPECIALS
        self._ranks = len(ranks)
        self._encoding = tiktoken.Encoding(
            name=self.sha256, pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens={}
        )

    def encode(self, text: str) -> np.ndarray:
        return np.array(self._encoding.encode_ordinary(text), dtype=np.int64)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return self._encoding.decode([int(i) for i in ids if i < self._ranks])


def parse_ranks(data: bytes, where: str) -> dict[bytes, int]:
    """The token -> rank table of a `tiktoken.model` file.

    Raises TokenizerError, naming `where` and the line, unless every line is one base64 token and its rank,
    the ranks are 0..n-1, and the 256 single bytes are all there (else some text could not be encoded).
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise TokenizerError(
                f"{where}, line {number}: not a tiktoken.model file (expected a base64 token and its rank)"
            ) from None
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise TokenizerError(f"{where}: the ranks are not 0..n-1, each once; is the file complete?")
    if missing := sum(bytes([b]) not in ranks for b in range(256)):
        raise TokenizerError(f"{where}: {missing} of the 256 single bytes are missing; is the file complete?")
    return ranks


def load_tokenizer(path: str | Path | None = None) -> Tokenizer:
    """Bytes without a path; otherwise the `tiktoken.model` file at `path`. Raises TokenizerError."""
    return ByteTokenizer() if path is None else TiktokenTokenizer(path)
