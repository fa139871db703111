"use strict";
/* The server's routes. Addresses are relative, so that a proxy may serve the page below a path. */

const STORED_KEY = "minillm-api-key";

/** Why a request failed, in one sentence; `status` is 0 if there was no answer. */
class Refusal extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

const UNREACHABLE = "The server cannot be reached.";
const KEY_WANTED =
  "The API key is missing or wrong; enter the server's key in the field \u201cAPI key\u201d.";

/** One sentence for a status, the server's own message, and the seconds of Retry-After. */
function sentence(status, message, retryAfter) {
  const said = oneLine(message ?? "");
  if (status === 401) return KEY_WANTED;
  if (status === 429 || status === 503) {
    const stem = said.replace(/[.\s]+$/, "") || "The server accepts no requests now";
    return retryAfter ? `${stem}; try again in ${plural(retryAfter, "second")}.` : `${stem}.`;
  }
  return said || `The server answered with status ${status}.`;
}

async function refusal(response) {
  let message = "";
  try {
    const { error } = await response.json();
    message = typeof error === "string" ? error : error?.message;
  } catch {
    // The body is not JSON: the status has to do.
  }
  const wait = parseInt(response.headers.get("Retry-After"), 10);
  return new Refusal(sentence(response.status, message, wait), response.status);
}

class Api {
  get key() {
    return sessionStorage.getItem(STORED_KEY) ?? "";
  }

  set key(value) {
    if (value) sessionStorage.setItem(STORED_KEY, value);
    else sessionStorage.removeItem(STORED_KEY);
  }

  /** The response of a route, if its status is 200. */
  async request(route, options = {}) {
    const headers = { ...options.headers },
      { key } = this;
    // A header has Latin-1 characters only, and no key has others than these.
    if (/[^\x21-\x7e]/.test(key)) throw new Refusal(KEY_WANTED, 401);
    if (key) headers.Authorization = `Bearer ${key}`;
    let response;
    try {
      response = await fetch(route, { ...options, headers, cache: "no-store" });
    } catch (error) {
      throw error.name === "AbortError" ? error : new Refusal(UNREACHABLE);
    }
    if (!response.ok) throw await refusal(response);
    return response;
  }

  post(route, body, signal, more = {}) {
    const headers = { "Content-Type": "application/json", ...more };
    return this.request(route, { method: "POST", headers, body: JSON.stringify(body), signal });
  }

  async json(route) {
    const response = await this.request(route);
    try {
      return await response.json();
    } catch {
      throw new Refusal(`The server's answer to ${route} is not JSON.`);
    }
  }
}

/** The data of server-sent events: every `data:` line as it arrives, without comments. */
async function* eventData(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split(/\r?\n/);
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data:")) yield line.slice(5).trim();
  }
}
