"""Files of the page at `/`, read once at startup; no request path reaches the file system."""

from __future__ import annotations

import mimetypes
from pathlib import Path

FOLDER, INDEX = Path(__file__).parents[1] / "page", "index.html"
HEADERS = [
    (
        "content-security-policy",
        "default-src 'self'; img-src 'self' blob: data:; style-src 'self' 'unsafe-inline'; frame-ancestors 'none'",
    ),
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
    ("cache-control", "no-cache"),
]


def _read() -> dict[str, tuple[str, bytes]]:
    found = {}
    for path in sorted(FOLDER.iterdir()):
        kind = mimetypes.guess_type(path.name)[0]
        if kind is None or not path.is_file():
            continue
        text = kind.startswith("text/") or kind.endswith(("javascript", "json"))
        name = "/" if path.name == INDEX else f"/page/{path.name}"
        found[name] = (f"{kind}; charset=utf-8" if text else kind, path.read_bytes())
    return found


FILES = _read()  # path of a URL: Content-Type and content
