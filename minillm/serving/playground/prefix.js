"use strict";
/* The prompt of the last request: which part of it came from the prefix cache. */

class PrefixView {
  constructor(api) {
    this.api = api;
    this.clear();
  }

  clear() {
    this.shown = null;
    byId("prefix").hidden = true;
  }

  /** Say how much was cached; then, if the server can split the prompt, show which part. */
  async show(generation) {
    const { cachedTokens: cached, promptTokens: total } = generation;
    this.clear();
    if (cached === null || !total) return;
    this.shown = generation;
    byId("prefix").hidden = false;
    byId("prefix-prompt").hidden = true;
    byId("prefix-text").textContent = cached
      ? `${count(cached)} of ${plural(total, "token")} came from the prefix cache; ${count(total - cached)} had to be computed.`
      : `None of the ${plural(total, "token")} came from the prefix cache.`;
    byId("prefix-bar").firstChild.style.width = `${(100 * cached) / total}%`;
    const parts = cached ? await this._split(generation).catch(() => null) : null;
    if (!parts || this.shown !== generation) return;
    const [before, after] = parts;
    byId("prefix-prompt").hidden = false;
    byId("prefix-prompt").replaceChildren(element("mark", before), element("span", after));
  }

  /** The texts of the cached and of the computed tokens, or null if the tokens are not the same
   * ones as the request's. */
  async _split({ body, cachedTokens, promptTokens }) {
    const { model, prompt, messages } = body,
      asked = messages ? { messages, add_generation_prompt: true } : { prompt };
    const { tokens } = await (await this.api.post("tokenize", { model, ...asked })).json();
    if (tokens?.length !== promptTokens) return null;
    const halves = [tokens.slice(0, cachedTokens), tokens.slice(cachedTokens)];
    return Promise.all(halves.map((half) => this._text(model, half)));
  }

  async _text(model, tokens) {
    if (!tokens.length) return "";
    const response = await this.api.post("detokenize", { model, tokens });
    return (await response.json()).prompt;
  }
}
