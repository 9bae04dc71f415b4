"""Files that exist whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_atomic(path: Path | str, data: bytes | str) -> None:
    """Write `data` to `path`: a reader, a killed run or a full disk never leaves half a file there.

    Raises OSError with `path` named; the previous content, if any, is then still in place.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as f:
            f.write(data.encode() if isinstance(data, str) else data)
            f.flush()
            os.fsync(f.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as e:
        raise OSError(e.errno, f"could not write {path}: {e.strerror}") from e
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)
