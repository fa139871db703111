"use strict";
/* What the scheduler did with one request: GET /debug/requests/{id}, which servers have off. */

const KINDS = ["waiting", "prefill", "decode", "preempted", "swapped", "finished"];
const MOST_ROWS = 200;
const TRACE_OFF =
  "The server shows no steps of requests; it does if it is started with --enable-request-trace.";

/** Neighbouring events of the same kind and reason as one; each lasts until the next begins. */
function mergeEvents(events) {
  const merged = [];
  for (const { step, time, kind, tokens, reason } of events) {
    const before = merged.at(-1);
    if (before) before.until = time;
    if (before && before.kind === kind && before.reason === reason) {
      before.last = step;
      before.tokens += tokens ?? 0;
    } else {
      merged.push({ kind, reason, first: step, last: step, from: time, until: time, tokens: tokens ?? 0 });
    }
  }
  return merged;
}

class StepTrace {
  constructor(api) {
    this.api = api;
    this.clear();
  }

  clear() {
    this.off = false;
    this.wanted = null;
    this.queueTime = null; // seconds
    byId("trace").hidden = true;
  }

  /** Ask for the steps of a request and draw them; `final` if the request has ended. */
  async show(id, final) {
    if (this.off && !final) return;
    this.wanted = id;
    try {
      const found = await this.api.json(`debug/requests/${encodeURIComponent(id)}`);
      if (this.wanted === id) this._draw(found);
    } catch (error) {
      if (!(error instanceof Refusal)) throw error;
      if (this.wanted !== id) return;
      this.off = [403, 404].includes(error.status);
      if (final || !this.off) this._note(this.off ? TRACE_OFF : error.message);
    }
  }

  _note(text) {
    byId("trace").hidden = false;
    byId("trace-note").textContent = text;
    byId("trace-bar").hidden = byId("trace-list").hidden = true;
  }

  _draw({ state, events, queue_time: queueTime, prefix }) {
    const merged = mergeEvents(events);
    this.queueTime = queueTime ?? null;
    this._note(this._summary(state, merged, prefix));
    if (!merged.length) return;
    byId("trace-bar").hidden = byId("trace-list").hidden = false;
    const end = merged.at(-1).until,
      gap = element("i"),
      share = (duration) => 1000 * (duration / (end || 1)); // sums below 1 would not fill the bar
    gap.style.flexGrow = share(merged[0].from);
    const parts = merged.map(({ kind, from, until }) => {
      const part = element(`i.kind.${this._class(kind)}`);
      part.style.flexGrow = share(until - from);
      return part;
    });
    byId("trace-bar").replaceChildren(gap, ...parts);
    const rows = merged.slice(0, MOST_ROWS).map((run) => this._row(run));
    const more = merged.length - rows.length;
    if (more > 0) rows.push(element("li.note", `and ${plural(more, "more change")}`));
    byId("trace-list").replaceChildren(element("ol", ...rows));
    byId("trace-bar").title = `from its arrival to ${seconds(end)} after it`;
  }

  _class(kind) {
    return KINDS.includes(kind) ? kind : "other";
  }

  _summary(state, merged, prefix) {
    const parts = [`The request is ${oneLine(state)}`];
    if (merged.length) parts.push(`${seconds(merged.at(-1).until)} after its arrival`);
    const counts = Object.entries(prefix ?? {})
      .filter(([, value]) => ["number", "string"].includes(typeof value))
      .map(([name, value]) => `${name.replaceAll("_", " ")} ${value}`);
    const said = counts.length ? ` Prefix cache: ${oneLine(counts.join(", "))}.` : "";
    return `${parts.join(", ")}.${said}`;
  }

  _row({ kind, reason, first, last, from, until, tokens }) {
    const steps = first === last ? `step ${count(first)}` : `steps ${count(first)}\u2013${count(last)}`;
    return element(
      "li",
      element("span.what", element(`i.kind.${this._class(kind)}`), oneLine(kind)),
      element("span.steps", steps),
      element("span.tokens-of-step", tokens ? plural(tokens, "token") : ""),
      element("span.when", `at ${seconds(from)}${until > from ? `, for ${seconds(until - from)}` : ""}`),
      reason ? element("span.reason", oneLine(reason)) : "",
    );
  }
}
