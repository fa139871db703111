"""The playground: one static page that talks to the server's own routes, and to nothing else.

Style and scripts are inlined into the page. A content security policy with their hashes blocks all
other scripts and styles, and every address but the server's own.
"""

import base64
import hashlib
import re
from functools import cache
from importlib import resources

SCRIPTS = ("numbers", "words", "api", "generation", "tokens", "trace", "prefix", "load", "chat",
           "app", "main")  # fmt: skip


def page() -> str:
    """The HTML page of the playground."""
    values = {"style": style(), "script": script()}
    # In one pass, so that placeholders in inserted text are not replaced.
    return re.sub(r"\{\{(\w+)\}\}", lambda place: values[place[1]], read("index.html"))


def headers() -> dict[str, str]:
    """The response headers of the page."""
    return {
        "Content-Security-Policy": content_security_policy(),
        "Cache-Control": "no-cache",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }


@cache
def content_security_policy() -> str:
    """The page runs its own script, has its own style and connects to its own server only; text
    cannot become markup, no form is sent, and no other page may show this one in a frame."""
    directives = (
        "default-src 'none'",
        f"script-src '{digest(script())}'",
        f"style-src '{digest(style())}'",
        "connect-src 'self'",
        "img-src data:",  # the empty icon
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
    return "; ".join(directives)


def script() -> str:
    """All scripts of the page, in the order in which they need each other."""
    return "\n".join(read(f"{name}.js") for name in SCRIPTS)


def style() -> str:
    """The style sheet of the page."""
    return read("style.css")


def read(name: str) -> str:
    """A file of the playground's folder."""
    return resources.files("minillm.serving").joinpath("playground", name).read_text("utf-8")


def digest(text: str) -> str:
    """The hash of an inline script or style in a content security policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
