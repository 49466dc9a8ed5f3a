"""Data inside the page: JSON that is safe in a script element, and packets that are unpacked when they are shown."""

import base64
import json
import zlib


def plain_json(content: object) -> str:
    """JSON that is safe inside a script element."""
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


def packed(content: object) -> str:
    """JSON, deflated, in base64."""
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()
