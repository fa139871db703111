"""A browser tab with the playground of a scripted server, and what the server's script says."""

import math
from typing import Any

from tests.serving.playground_server import PlaygroundServer, Script, frames

LOAD = {"server_load": 4, "running": 3, "waiting": 1, "kv_cache_usage": 0.25}
SENTENCE = frames(
    (" there", math.log(0.95), {" was": math.log(0.03)}),
    (" was", math.log(0.6), {" is": math.log(0.3), "\n": math.log(0.05)}),
    (" a", math.log(0.3), {" the": math.log(0.4)}),
    (" fox", math.log(0.1), {" dog": math.log(0.5)}),
    (".", math.log(0.01), {" who": math.log(0.9)}),
)
TRACE = {
    "id": "cmpl-1",
    "state": "finished",
    "queue_time": 0.012,
    "cached_tokens": 4,
    "prefix": {"cached": 4, "missed_because": "last token", "blocks": [1, 2]},
    "events": [
        {"step": 6, "time": 0.001, "kind": "waiting", "tokens": 0,
         "reason": "no blocks: needs 7, has 3"},
        {"step": 7, "time": 0.006, "kind": "waiting", "tokens": 0,
         "reason": "no blocks: needs 7, has 3"},
        {"step": 8, "time": 0.009, "kind": "waiting", "tokens": 0,
         "reason": "no blocks: needs 7, has 5"},
        {"step": 9, "time": 0.012, "kind": "prefill", "tokens": 12, "reason": None},
        *({"step": 10 + i, "time": 0.02 + i / 500, "kind": "decode", "tokens": 1, "reason": None}
          for i in range(4)),
        {"step": 14, "time": 0.03, "kind": "finished", "tokens": 0, "reason": None},
    ],
}  # fmt: skip


class Keys:
    """The keys of selenium, which may be missing here."""

    TAB, ENTER, SHIFT, CONTROL, ESCAPE = "\ue004", "\ue007", "\ue008", "\ue009", "\ue00c"
    END, HOME, LEFT, UP, RIGHT, DOWN = "\ue010", "\ue011", "\ue012", "\ue013", "\ue014", "\ue015"


class Tab:
    """A browser with the page of a scripted server."""

    def __init__(self, driver: Any, server: PlaygroundServer, script: Script):
        self.driver, self.script = driver, script
        server.follow(script)
        driver.get(server.address)
        self.wait("return document.getElementById('model').options.length > 0")

    def run(self, code: str, *args: Any) -> Any:
        """Run JavaScript and return what it returns."""
        return self.driver.execute_script(code, *args)

    def wait(self, code: str, *args: Any) -> None:
        """Wait until JavaScript returns something true, 20 seconds at most."""
        from selenium.webdriver.support.ui import WebDriverWait

        WebDriverWait(self.driver, 20, 0.02).until(lambda _: self.run(code, *args), code)

    def press(self, *keys: str, held: str | None = None) -> None:
        """Type keys, one after the other, wherever the focus is."""
        from selenium.webdriver import ActionChains

        actions = ActionChains(self.driver, duration=0)
        if held:
            actions.key_down(held)
        for key in keys:
            actions.send_keys(key)
        if held:
            actions.key_up(held)
        actions.perform()

    def send(self) -> None:
        self.press(Keys.ENTER, held=Keys.CONTROL)

    def finish(self) -> None:
        """Send and wait for the end of the reply."""
        self.send()
        self.wait(
            "return /^(Finished|Stopped)/.test(document.getElementById('status').textContent)"
        )
        self.wait("return !document.getElementById('last').hidden")

    def fail(self) -> str:
        """Send and wait for the error; its text."""
        self.send()
        self.wait("return !document.getElementById('error').hidden")
        return self.text("error")

    def text(self, name: str) -> str:
        return self.run("return document.getElementById(arguments[0]).textContent", name)

    def shown(self, name: str) -> bool:
        return self.run("return document.getElementById(arguments[0]).checkVisibility()", name)

    def fill(self, name: str, text: str) -> None:
        self.run("const e = document.getElementById(arguments[0]); e.focus(); e.select()", name)
        self.press(text)

    def focused(self) -> str:
        return self.run("const e = document.activeElement; return e.id || e.className || e.tagName")

    def tokens(self, box: str = "#output") -> list[str]:
        code = "return [...document.querySelectorAll(arguments[0] + ' .token')]"
        return self.run(code + ".map((e) => e.textContent)", box)


def resize(driver: Any, width: int, height: int) -> None:
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def prefer(driver: Any, scheme: str) -> None:
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def usage(prompt: int, completion: int, cached: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
