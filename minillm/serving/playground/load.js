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
    Object.assign(this, { api, onTick, busy: false, before: null, history: [] });
    this.refused = new Set(); // routes that gave a client error: they would give it every second
  }

  start() {
    setInterval(() => this.tick(), 1000);
    document.addEventListener("visibilitychange", () => this.tick());
    return this.tick();
  }

  /** Ask again after a refusal, because the key is another one. */
  retry() {
    this.refused.clear();
    return this.tick();
  }

  async tick() {
    if (document.hidden || this.busy) return;
    this.busy = true;
    const errors = [];
    try {
      errors.push(await this._ask("load", async (reply) => this._gauges(await reply.json())));
      errors.push(await this._ask("metrics", async (reply) => this._rates(await reply.text())));
      if (!this.refused.size) this._note(errors.find((error) => error !== null));
      await this.onTick();
    } finally {
      this.busy = false;
    }
  }

  /** Ask one route and use its reply; the error, or null. */
  async _ask(route, use) {
    if (this.refused.has(route)) return null;
    try {
      await use(await this.api.request(route));
      return null;
    } catch (error) {
      this.before = null;
      if (error.status >= 400 && error.status < 500) {
        this.refused.add(route);
        this._note(error);
      }
      return error;
    }
  }

  _note(error) {
    byId("load-note").hidden = !error;
    const known = error instanceof Refusal ? error.message : UNREACHABLE;
    byId("load-note").textContent = error ? known : "";
  }

  _gauges({ running, waiting, kv_cache_usage: used }) {
    byId("load-running").textContent = count(running ?? 0);
    byId("load-waiting").textContent = count(waiting ?? 0);
    byId("load-cache").textContent = percent(used ?? 0);
    byId("load-bar").firstChild.style.width = `${100 * (used ?? 0)}%`;
  }

  _rates(text) {
    const now = { ...readMetrics(text), time: performance.now() / 1000 },
      { before } = this,
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
