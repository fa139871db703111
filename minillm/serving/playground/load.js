"use strict";
/* The load of the server, asked for once per second while the page is visible. */

const HISTORY = 60; // seconds
const COUNTERS = ["generation_tokens_total", "prompt_tokens_total"];

/** The sums of the wanted metrics over their labels. Names have a prefix such as `vllm:`. */
function readMetrics(text) {
  const found = {};
  for (const line of text.split("\n")) {
    const match = /^(?:[A-Za-z_]\w*:)?([A-Za-z_]\w*)(?:\{.*\})?\s+(\S+)/.exec(line);
    if (match && COUNTERS.includes(match[1])) {
      found[match[1]] = (found[match[1]] ?? 0) + parseFloat(match[2]);
    }
  }
  return found;
}

class Load {
  constructor(api, onTick) {
    Object.assign(this, { api, onTick, busy: false, refused: false, before: null, history: [] });
  }

  start() {
    setInterval(() => this.tick(), 1000);
    document.addEventListener("visibilitychange", () => this.tick());
    return this.tick();
  }

  /** Ask again after a refusal, because the key is another one. */
  retry() {
    this.refused = false;
    return this.tick();
  }

  async tick() {
    if (document.hidden || this.busy) return;
    this.busy = true;
    try {
      if (!this.refused) await this._ask();
      await this.onTick();
    } catch (error) {
      this._fail(error);
    } finally {
      this.busy = false;
    }
  }

  async _ask() {
    this._gauges(await this.api.json("load"));
    const metrics = await (await this.api.request("metrics")).text();
    this._rates({ ...readMetrics(metrics), time: performance.now() / 1000 });
    byId("load-note").hidden = true;
  }

  _fail(error) {
    this.refused = error.status >= 400 && error.status < 500; // the same answer every second
    this.before = null;
    byId("load-note").hidden = false;
    byId("load-note").textContent = error instanceof Refusal ? error.message : UNREACHABLE;
  }

  _gauges({ running, waiting, kv_cache_usage: used }) {
    byId("load-running").textContent = count(running ?? 0);
    byId("load-waiting").textContent = count(waiting ?? 0);
    byId("load-cache").textContent = percent(used ?? 0);
    byId("load-bar").firstChild.style.width = `${100 * (used ?? 0)}%`;
  }

  _rates(now) {
    const { before } = this,
      passed = before ? now.time - before.time : 0;
    this.before = now;
    if (!passed) return;
    const [generated, prompts] = COUNTERS.map((name) =>
      Math.max(0, (now[name] - before[name]) / passed),
    );
    byId("load-generated").textContent = Number.isFinite(generated) ? rate(generated) : "\u2013";
    byId("load-prompts").textContent = Number.isFinite(prompts) ? rate(prompts) : "\u2013";
    this.history = [...this.history, generated || 0].slice(-HISTORY);
    this._curve();
  }

  _curve() {
    const highest = Math.max(1, ...this.history),
      start = HISTORY - this.history.length;
    const points = this.history.map((value, i) => `${start + i},${23 - (22 * value) / highest}`);
    byId("load-curve").firstElementChild.setAttribute("points", points.join(" "));
    byId("load-scale").textContent =
      `Generated tokens/s of the last minute, at most ${rate(Math.max(...this.history))}`;
  }
}
