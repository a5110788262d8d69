"""Files of the page at `/`, read once at startup; requests never access the file system."""

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
    files = {}
    for path in sorted(FOLDER.iterdir()):
        media_type = mimetypes.guess_type(path.name)[0]
        if media_type is None or not path.is_file():
            continue
        is_text = media_type.startswith("text/") or media_type.endswith(("javascript", "json"))
        url_path = "/" if path.name == INDEX else f"/page/{path.name}"
        files[url_path] = (f"{media_type}; charset=utf-8" if is_text else media_type, path.read_bytes())
    return files


FILES = _read()  # Content-Type and content by path of the URL
