"use strict";
/* One request: it is sent, its frames are read, and what is counted and timed is kept. */

/** Text and tokens of a choice. A token has a text, a logprob, and alternatives [text, logprob]. */
function readChoice(choice) {
  const { logprobs } = choice,
    { reasoning_content: thought, content } = choice.delta ?? {},
    text = choice.text ?? (thought ?? "") + (content ?? "");
  let tokens = [];
  if (logprobs?.content) {
    tokens = logprobs.content.map(({ token, logprob, top_logprobs: top }) => ({
      text: token,
      logprob,
      alternatives: (top ?? []).map((other) => [other.token, other.logprob]),
    }));
  } else if (logprobs?.tokens) {
    tokens = logprobs.tokens.map((token, i) => ({
      text: token,
      logprob: logprobs.token_logprobs?.[i] ?? null,
      alternatives: Object.entries(logprobs.top_logprobs?.[i] ?? {}),
    }));
  }
  return { text, tokens };
}

class Generation {
  constructor(api, route, body) {
    Object.assign(this, { api, route, body, controller: new AbortController(), stopped: false });
    this.name = randomName(); // a server makes the id of it
    Object.assign(this, { id: null, usage: null, finish: null, queue: null, text: "" });
    Object.assign(this, { seen: 0, seenFirst: 0, sent: 0, first: null, last: null });
  }

  stop() {
    this.stopped = true;
    this.controller.abort();
  }

  /** Send the request and hand text and tokens of every frame to `show`; Refusal if it fails. */
  async run(show) {
    this.sent = performance.now();
    try {
      const headers = { "X-Request-Id": this.name },
        response = await this.api.post(this.route, this.body, this.controller.signal, headers);
      this.queue = milliseconds(response.headers.get("x-minillm-queue-time-ms"));
      await this._read(response, show);
    } catch (error) {
      if (this.stopped) return;
      if (error instanceof Refusal) throw error;
      const broken = error instanceof SyntaxError ? "sent what is not JSON" : "broke the connection";
      throw new Refusal(`The server ${broken} before the reply was complete.`);
    }
  }

  async _read(response, show) {
    for await (const data of eventData(response)) {
      if (data === "[DONE]") return;
      const frame = JSON.parse(data);
      if (frame.error) throw failureOf(frame.error);
      this.id ??= frame.id ?? null;
      if (frame.usage) this.usage = frame.usage;
      this.queue = milliseconds(frame.usage?.queue_time_ms) ?? this.queue;
      const choice = frame.choices?.[0];
      if (!choice) continue;
      const { text, tokens } = readChoice(choice);
      this._count(text, tokens.length);
      this.finish = choice.finish_reason ?? this.finish;
      show(text, tokens);
    }
    throw new Refusal("The server ended the reply before it was complete.");
  }

  _count(text, tokens) {
    if (!text && !tokens) return;
    this.text += text;
    this.seen += tokens;
    this.last = performance.now();
    if (this.first === null) [this.first, this.seenFirst] = [this.last, tokens];
  }

  /** The id, before the first frame as the server will make it. */
  get expectedId() {
    return this.id ?? `${this.body.messages ? "chatcmpl" : "cmpl"}-${this.name}`;
  }

  get numTokens() {
    return this.usage?.completion_tokens ?? this.seen;
  }

  get promptTokens() {
    return this.usage?.prompt_tokens ?? null;
  }

  get cachedTokens() {
    return this.usage?.prompt_tokens_details?.cached_tokens ?? null;
  }

  /** Tokens per second after the first frame, or null for too short a reply. */
  get speed() {
    const passed = (this.last - this.first) / 1000,
      tokens = this.seen - this.seenFirst;
    return passed > 0 && tokens > 0 ? tokens / passed : null;
  }

  /** Pairs of name and value for the line under the reply; `queue` in seconds, if known. */
  facts(queue) {
    const ending = this.stopped ? "stopped by you" : this.finish;
    const facts = [[ending ? `tokens (${oneLine(ending)})` : "tokens", count(this.numTokens)]];
    if (this.first !== null) {
      facts.push(["to the first token (TTFT)", seconds((this.first - this.sent) / 1000)]);
    }
    if (this.speed !== null) facts.push(["tokens/s after it", rate(this.speed)]);
    if (this.cachedTokens !== null && this.promptTokens !== null) {
      const cached = `${count(this.cachedTokens)} of ${count(this.promptTokens)}`;
      facts.push(["prompt tokens cached", cached]);
    }
    if (queue !== null) facts.push(["in the queue", seconds(queue)]);
    return facts;
  }
}

/** An error that comes as a frame, after the status 200. */
function failureOf(error) {
  const status = Number(error.code) || 0;
  return new Refusal(sentence(status, error.message ?? error), status);
}

function randomName() {
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return [...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** A number of milliseconds of a header or a field, or null. */
function milliseconds(value) {
  const number = parseFloat(value);
  return Number.isFinite(number) && number >= 0 ? number : null;
}
