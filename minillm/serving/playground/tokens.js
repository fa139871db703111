"use strict";
/* The reply as tokens: each is coloured and underlined by its probability, and shows its
 * alternatives under the pointer and the focus. */

// The least probability of each class, from the most probable one.
const LEVELS = [0.9, 0.5, 0.2, 0.05, 0];
const LEVEL_NAMES = ["90% or more", "50\u201390%", "20\u201350%", "5\u201320%", "below 5%"];
const levelOf = (probability) => LEVELS.findIndex((least) => probability >= least);
const probabilityOf = (logprob) => Math.min(1, Math.exp(logprob));

/** The legend, drawn with the very classes of the tokens. */
function showLegend(root) {
  root.append(
    element("span", "Probability"),
    ...LEVEL_NAMES.map((name, level) => element(`span.token.level-${level}`, name)),
  );
}

/** What a token is and what else could have stood there. */
class TokenPanel {
  constructor(section, root) {
    Object.assign(this, { section, root });
  }

  show({ text, logprob, alternatives }) {
    const shown = new Map([[text, logprob]]);
    // Different tokens may have the same string: the most probable one is shown.
    for (const [other, value] of alternatives) {
      if (!(shown.get(other) >= value)) shown.set(other, value);
    }
    const rows = [...shown].sort((a, b) => b[1] - a[1]);
    const rest = 1 - rows.reduce((sum, [, value]) => sum + probabilityOf(value), 0);
    const list = element("ol", ...rows.map(([other, value]) => this._row(other, value, text)));
    if (rest > 0.00005) list.append(element("li.rest", `all other tokens ${percent(rest)}`));
    this.root.replaceChildren(list);
    this.section.dataset.open = "";
  }

  _row(other, logprob, chosen) {
    const probability = probabilityOf(logprob),
      bar = element("div.bar", element("i"));
    bar.firstChild.style.width = `${probability * 100}%`;
    const row = element(
      other === chosen ? "li.chosen" : "li",
      element("span.name", quoted(other)),
      element("span.mark", other === chosen ? "chosen" : ""),
      element("span.value", percent(probability)),
      bar,
    );
    return row;
  }

  close() {
    delete this.section.dataset.open;
  }
}

/** The tokens of one reply, in `box`. One of them is in the focus order; arrows move to others. */
class TokenView {
  constructor(box, panel, label) {
    Object.assign(this, { box, panel, tokens: [], pending: [], current: null });
    this.spans = new Map();
    box.setAttribute("role", "listbox");
    box.setAttribute("aria-label", label);
    box.addEventListener("keydown", (event) => this._key(event));
    box.addEventListener("focusin", ({ target }) => this._choose(target));
    box.addEventListener("pointerover", ({ target }) => this._point(target));
    box.addEventListener("pointerleave", () => this._release());
    box.addEventListener("focusout", () => this.panel.close());
  }

  /** A frame: its text, and its tokens, whose texts may be held back until later frames. */
  add(text, tokens) {
    const { box } = this,
      atEnd = box.scrollTop + box.clientHeight >= box.scrollHeight - 4;
    for (const token of tokens) this._append(token);
    this._allot(text);
    if (atEnd) box.scrollTop = box.scrollHeight;
  }

  _append(token) {
    const known = token.logprob !== null,
      level = known ? levelOf(probabilityOf(token.logprob)) : 0,
      span = element(known ? `span.token.level-${level}` : "span.token");
    const says = known ? `, ${percent(probabilityOf(token.logprob))}` : "";
    span.setAttribute("role", "option");
    span.setAttribute("aria-label", `${quoted(token.text)}${says}`);
    span.setAttribute("aria-selected", "false");
    span.tabIndex = this.tokens.length ? -1 : 0;
    this.current ??= span;
    this.spans.set(span, token);
    this.tokens.push(span);
    this.pending.push({ span, rest: token.text });
    this.box.append(span);
  }

  /** Give text to the tokens that have none yet. A token's string is not always its text: a
   * character may have several tokens, and special tokens have no text. All text is shown. */
  _allot(text) {
    const { pending } = this;
    while (text) {
      const [head, next] = pending;
      if (!head) {
        this.box.append(text);
        return;
      }
      if (head.rest && head.rest.startsWith(text) && head.rest !== text) {
        head.span.append(text);
        head.rest = head.rest.slice(text.length);
        return;
      }
      let length = text.length;
      if (text.startsWith(head.rest)) {
        length = head.rest.length;
      } else if (next) {
        length = 0;
        const partial = /^bytes:|\ufffd/.test(next.rest);
        while (!partial && !agree(text.slice(length), next.rest)) length++;
      }
      this._give(head.span, text.slice(0, length));
      pending.shift();
      text = text.slice(length);
    }
  }

  _give(span, text) {
    span.append(text);
    span.classList.toggle("break", /^\n+$/.test(span.textContent));
  }

  _choose(target) {
    const span = target.closest(".token");
    if (!this.spans.has(span)) return;
    this.current.tabIndex = -1;
    this.current.setAttribute("aria-selected", "false");
    this.current = span;
    span.tabIndex = 0;
    span.setAttribute("aria-selected", "true");
    this._show(span);
  }

  _point(target) {
    const span = target.closest(".token");
    if (this.spans.has(span)) this._show(span);
  }

  _show(span) {
    const token = this.spans.get(span);
    if (token.logprob !== null) this.panel.show(token);
  }

  /** The pointer has left: what has the focus is shown again. */
  _release() {
    if (this.spans.has(document.activeElement)) this._show(document.activeElement);
    else this.panel.close();
  }

  _key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const { tokens } = this,
      place = tokens.indexOf(this.current);
    const target = {
      ArrowLeft: () => tokens[place - 1],
      ArrowRight: () => tokens[place + 1],
      Home: () => tokens[0],
      End: () => tokens.at(-1),
      ArrowUp: () => this._line(tokens.slice(0, place).reverse()),
      ArrowDown: () => this._line(tokens.slice(place + 1)),
    }[event.key]?.();
    if (!target) return;
    event.preventDefault();
    target.focus();
  }

  /** The nearest token on the line of the first candidate that stands on another line. */
  _line(candidates) {
    const here = this.current.getBoundingClientRect(),
      boxes = candidates.map((span) => [span, span.getBoundingClientRect()]);
    const found = boxes.find(([, box]) => Math.abs(box.top - here.top) > here.height / 2);
    if (!found) return null;
    const distance = ([, box]) => Math.abs(box.left - here.left);
    return boxes
      .filter(([, box]) => Math.abs(box.top - found[1].top) < here.height / 2)
      .reduce((best, each) => (distance(each) < distance(best) ? each : best))[0];
  }
}

/** Whether a text can be, or can begin, the text of a token. */
const agree = (text, token) => text.startsWith(token) || token.startsWith(text);
