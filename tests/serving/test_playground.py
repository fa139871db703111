"""The playground's page as a text: what it may load, run and connect to."""

import base64
import hashlib
import re

from minillm.serving import playground_page


def test_the_page_has_no_outside_address() -> None:
    page = playground_page.page()
    assert "{{" not in page
    assert re.findall(r"https?:|wss?:|[\"'(]//", page) == []
    links = re.findall(r"(?:src|href|action|srcset)\s*=\s*\"([^\"]*)\"|url\(([^)]*)\)", page)
    assert links == [("data:,", "")]
    assert "@import" not in page


def test_the_policy_allows_this_script_and_this_style_only() -> None:
    page, policy = playground_page.page(), playground_page.content_security_policy()
    allowed = dict(part.split(" ", 1) for part in policy.split("; "))
    assert allowed["default-src"] == "'none'"
    assert allowed["connect-src"] == "'self'"
    assert "unsafe" not in policy
    for tag, directive in (("script", "script-src"), ("style", "style-src")):
        (found,) = re.findall(rf"<{tag}\b[^>]*>(.*?)</{tag}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(found.encode()).digest()).decode()
        assert allowed[directive] == f"'sha256-{digest}'"
    assert playground_page.headers()["Content-Security-Policy"] == policy
    markup = re.sub(r"<(script|style)>.*?</\1>", "", page, flags=re.DOTALL)
    assert re.findall(r"\s(?:on\w+|style)\s*=", markup) == []


def test_no_script_makes_markup_of_text() -> None:
    sinks = (
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|localStorage"
    )
    assert re.findall(sinks, playground_page.script()) == []
