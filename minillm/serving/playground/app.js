"use strict";
/* The page as a whole: tabs, the form, keys, and one request at a time. */

const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens", "seed"];
const MODES = ["completions", "chat"];
const NUM_ALTERNATIVES = 5;

/** The settings of the form; what is empty is the server's choice. */
function readSettings() {
  const settings = {};
  for (const name of NUMBERS) {
    const { value } = byId(name);
    if (value !== "") settings[name] = Number(value);
  }
  const escapes = { "\\n": "\n", "\\t": "\t", "\\\\": "\\" };
  const stop = byId("stop").value.split("\n").filter((line) => line !== "");
  if (stop.length) {
    settings.stop = stop.map((line) => line.replace(/\\[nt\\]/g, (found) => escapes[found]));
  }
  return settings;
}

class App {
  constructor() {
    this.api = new Api();
    this.panel = new TokenPanel(byId("token"), byId("token-text"));
    this.trace = new StepTrace(this.api);
    this.prefix = new PrefixView(this.api);
    this.conversation = new Conversation(this.panel);
    this.load = new Load(this.api, () => this._watch());
    Object.assign(this, { mode: "completions", generation: null, last: null, models: [] });
  }

  start() {
    showLegend(byId("legend"));
    this._bind();
    this._enable(false);
    return Promise.all([this._readModels(), this.load.start()]);
  }

  _bind() {
    byId("key").value = this.api.key;
    byId("key-form").addEventListener("submit", (event) => event.preventDefault());
    byId("key").addEventListener("change", () => this._setKey(byId("key").value.trim()));
    byId("model").addEventListener("change", () => this._checkChat());
    for (const mode of MODES) {
      byId(`${mode}-tab`).addEventListener("click", () => this._open(mode));
      byId(`${mode}-tab`).addEventListener("keydown", (event) => this._tabKey(event));
    }
    byId("request").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    byId("halt").addEventListener("click", () => this.stop());
    byId("forget").addEventListener("click", () => this._forget());
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.stop();
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
        event.preventDefault();
        this._setKey(byId("key").value.trim());
        if (byId("request").reportValidity()) this.send();
      }
    });
  }

  // ---- key, models and tabs ---------------------------------------------------------------------

  async _setKey(key) {
    if (key === this.api.key) return;
    this.api.key = key;
    this._error(null);
    await Promise.all([this._readModels(), this.load.retry()]);
  }

  async _readModels() {
    const first = this.models.length === 0;
    try {
      this.models = (await this.api.json("v1/models")).data ?? [];
    } catch (error) {
      this._error(error);
      return;
    }
    const chosen = byId("model").value;
    byId("model").replaceChildren(...this.models.map(({ id }) => element("option", id)));
    if (this.models.some(({ id }) => id === chosen)) byId("model").value = chosen;
    this._checkChat();
    // A model with a template is for chatting; a prompt that was typed meanwhile stays in sight.
    const entry = this.models.find(({ id }) => id === byId("model").value);
    const untouched = byId("prompt").value === byId("prompt").defaultValue;
    if (first && untouched && entry?.chat === true) this._open("chat");
  }

  /** Chat is off for a model without a template. */
  _checkChat() {
    const entry = this.models.find(({ id }) => id === byId("model").value),
      off = entry?.chat === false;
    byId("chat-tab").setAttribute("aria-disabled", String(off));
    byId("chat-note").hidden = !off;
    if (off && this.mode === "chat") this._open("completions");
  }

  _open(mode) {
    if (byId(`${mode}-tab`).getAttribute("aria-disabled") === "true") return;
    this.mode = mode;
    for (const each of MODES) {
      byId(`${each}-tab`).setAttribute("aria-selected", String(each === mode));
      byId(`${each}-tab`).tabIndex = each === mode ? 0 : -1;
      byId(`${each}-panel`).hidden = each !== mode;
    }
    byId("reply").hidden = mode !== "completions";
    byId("forget").hidden = mode !== "chat";
    byId("last").hidden = this.last !== mode;
    this._error(null);
  }

  _tabKey(event) {
    if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
    const other = MODES.find((mode) => `${mode}-tab` !== event.currentTarget.id);
    event.preventDefault();
    byId(`${other}-tab`).focus(); // a tab that is off has the focus, so that its note is read
    this._open(other);
  }

  _forget() {
    this.stop();
    this.conversation.forget();
    byId("last").hidden = true;
    this.last = null;
    byId("message").focus();
  }

  // ---- requests -----------------------------------------------------------------------------------

  stop() {
    this.generation?.stop();
  }

  async send() {
    if (this.generation) return;
    const chat = this.mode === "chat",
      text = byId(chat ? "message" : "prompt").value;
    if (chat && !text) {
      byId("message").focus();
      return;
    }
    const view = chat ? this.conversation.ask(text) : this._emptyOutput();
    if (chat) byId("message").value = "";
    const generation = this._generation(chat, text);
    this.generation = generation;
    this._begin();
    let failure = null;
    try {
      await generation.run((frame, tokens) => view.add(frame, tokens));
    } catch (error) {
      failure = error;
    }
    this.generation = null;
    const kept = !chat || this.conversation.end(generation.text);
    if (!kept && !byId("message").value) byId("message").value = text;
    await this._end(generation, failure);
  }

  _generation(chat, text) {
    const common = {
      model: byId("model").value || undefined,
      ...readSettings(),
      stream: true,
      stream_options: { include_usage: true, continuous_usage_stats: true },
    };
    if (!chat) {
      const body = { prompt: text, ...common, logprobs: NUM_ALTERNATIVES };
      return new Generation(this.api, "v1/completions", body);
    }
    const messages = this.conversation.request(byId("system").value);
    const body = { messages, ...common, logprobs: true, top_logprobs: NUM_ALTERNATIVES };
    return new Generation(this.api, "v1/chat/completions", body);
  }

  _emptyOutput() {
    const output = element("div.tokens");
    output.id = "output";
    byId("output").replaceWith(output);
    return new TokenView(output, this.panel, "Reply, token by token");
  }

  _begin() {
    this._error(null);
    this._enable(true);
    this.trace.clear();
    this.prefix.clear();
    this.last = this.mode;
    byId("last").hidden = true;
    byId("result").replaceChildren();
    byId("status").textContent = "Generating\u2026";
  }

  async _end(generation, failure) {
    this._enable(false);
    const tokens = plural(generation.numTokens, "token");
    const ending = generation.stopped ? `Stopped after ${tokens}.` : `Finished: ${tokens}.`;
    byId("status").textContent = failure ? "" : ending;
    this._error(failure);
    if (failure?.status === 401) byId("key").focus();
    if (generation.id === null) this.last = null;
    byId("last").hidden = this.last !== this.mode;
    if (generation.id === null) return;
    this._facts(generation);
    await this.prefix.show(generation);
    if (this.generation) return; // the next request has begun
    await this.trace.show(generation.id, true);
    this._facts(generation);
  }

  /** Counts and times. A response header, `usage` and the step trace may say the queue time. */
  _facts(generation) {
    if (this.generation) return;
    const queue = generation.queue === null ? this.trace.queueTime : generation.queue / 1000;
    const entries = generation
      .facts(queue)
      .map(([name, value]) => element("div", element("dt", name), element("dd", value)));
    byId("result").replaceChildren(...entries);
  }

  /** Every second: a request that runs may wait or be preempted, and its steps say why. */
  async _watch() {
    const { generation } = this;
    if (generation) {
      await this.trace.show(generation.expectedId, false);
      byId("last").hidden = this.last !== this.mode;
    }
  }

  /** Buttons that are off keep the focus, so that keyboards do not lose their place. */
  _enable(running) {
    byId("send").setAttribute("aria-disabled", String(running));
    byId("halt").setAttribute("aria-disabled", String(!running));
  }

  _error(error) {
    const known = error instanceof Refusal || error === null;
    byId("error").hidden = error === null;
    byId("error").textContent = error === null ? "" : error.message;
    if (!known) throw error;
  }
}
