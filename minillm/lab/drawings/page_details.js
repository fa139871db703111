"use strict";
/* The panel beside the drawing: the record of a step, a sequence and a block, in words. */

/** A new element with children; texts become text nodes, so no name is ever read as HTML. */
function element(tag, ...children) {
  const [name, ...classes] = tag.split("."),
    made = document.createElement(name);
  if (classes.length) made.className = classes.join(" ");
  made.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
  return made;
}

const MOST_LISTED = 12;

class Details {
  constructor(app) {
    this.app = app;
    this.box = document.getElementById("details");
  }

  show() {
    const { column, sequence, block, pinned } = this.app.cursor,
      { app } = this;
    if (column === null) {
      this.box.replaceChildren(
        element(
          "p.pin",
          "Point at the drawing, or press an arrow key: what happened there is told here.",
        ),
        this._overall(),
      );
      return;
    }
    const pin = element(
      pinned ? "p.pin.on" : "p.pin",
      pinned ? "Pinned \u2013 Escape releases" : "Click to pin",
    );
    const parts = [pin];
    if (sequence !== null) parts.push(this._sequence(sequence, column));
    if (block !== null && block < app.model.numBlocks) parts.push(this._block(block, column));
    parts.push(this._step(column));
    this.box.replaceChildren(...parts);
  }

  _facts(rows) {
    const list = element("dl");
    for (const [label, value] of rows) {
      if (value !== null && value !== undefined)
        list.append(element("dt", label), element("dd", value));
    }
    return list;
  }

  /** A name that selects its sequence when clicked. */
  _link(sequence) {
    const link = element("button.link.name", plain(this.app.model.sequences[sequence].name));
    link.type = "button";
    link.addEventListener("click", () => this.app.select(sequence));
    return link;
  }

  _overall() {
    const { meta } = this.app.model,
      list = [
        ["scheduling policy", meta.policy],
        ["admission", meta.admission],
        ["preemption", meta.preemption],
        ["prefix cache", meta.prefix_cache],
        ["block size", meta.block_size === null ? null : plural(meta.block_size, "token")],
        ["blocks", meta.num_blocks],
        ["blocks in host memory", meta.num_host_blocks],
        ["sequences at once, at most", meta.max_num_seqs],
        ["tokens per step, at most", meta.max_num_batched_tokens],
      ];
    return element(
      "section",
      element("h2", "The engine"),
      this._facts(
        list.map(([label, value]) => [label, typeof value === "number" ? count(value) : value]),
      ),
    );
  }

  // ---- a step --------------------------------------------------------------------------------

  _step(column) {
    const { model, words } = this.app,
      { steps, meta } = model;
    const section = element(
      "section",
      element(
        "h2",
        `Step ${count(steps.step[column])}`,
        element("small", `at ${moment(steps.start[column])}`),
      ),
    );
    const parts = ["plan", "run", "deliver"].map((name) => [name, steps[name][column]]);
    const took = parts.reduce((sum, [, value]) => sum + value, 0),
      bar = element("div.bar");
    const colours = this.app.curves.panels[3].parts.map((part) => css(part.colour(this.app.theme)));
    parts.forEach(([, value], i) => {
      const piece = element("div");
      piece.style.cssText = `flex: ${took ? value / took : 1} 1 0; background: ${colours[i]}`;
      bar.append(piece);
    });
    section.append(
      bar,
      this._facts([
        ["took", seconds(took)],
        ...parts.map(([name, value]) => [name, seconds(value)]),
      ]),
    );
    if (model.ranks.length)
      section.append(
        element("h3", "Ranks: computing + communicating or waiting"),
        this._facts(model.ranks.map(({ rank }, i) => [`rank ${rank}`, words.rank(i, column)])),
      );
    const tokens = steps.prefill[column] + steps.decode[column] + steps.drafted[column],
      limit = meta.max_num_batched_tokens;
    section.append(
      element("h3", "Decided"),
      this._facts([
        ["tokens", limit ? `${count(tokens)} of ${count(limit)}` : count(tokens)],
        ["prefill", count(steps.prefill[column])],
        [
          "\u2013 of these recomputed",
          steps.recomputed[column] ? count(steps.recomputed[column]) : null,
        ],
        ["decode", count(steps.decode[column])],
        ["drafted", steps.drafted[column] ? count(steps.drafted[column]) : null],
        [
          "\u2013 of these accepted",
          steps.drafted[column] ? count(steps.accepted[column]) : null,
        ],
        ["running", count(steps.running[column])],
        ["waiting", count(steps.waiting[column])],
        [
          "free blocks",
          meta.num_blocks
            ? `${count(steps.free[column])} of ${count(meta.num_blocks)}`
            : count(steps.free[column]),
        ],
        ["blocks copied on write", steps.copies[column] || null],
        ["blocks swapped out", steps.swapped_out[column] || null],
        ["blocks swapped in", steps.swapped_in[column] || null],
      ]),
    );
    const blocked = model.blockedAt(column);
    if (blocked)
      section.append(
        element("h3", "Next in line, but refused"),
        element("ul", element("li", this._link(blocked[0]), `: ${words.reason(blocked[1])}`)),
      );
    this._present(section, column);
    return section;
  }

  /** Who was there, in groups: first what is rare. */
  _present(section, column) {
    const { model } = this.app,
      present = model.presentAt(column);
    const lost = new Set(model.preemptedAt.get(column) ?? []);
    const now = [...(present[PREEMPTED] ?? []), ...(present[SWAPPED] ?? [])].filter(([sequence]) =>
      lost.has(sequence),
    );
    const still = (code) => (present[code] ?? []).filter(([sequence]) => !lost.has(sequence));
    const groups = [
      ["Preempted in this step", now],
      ["Ended in this step", this._ended(column)],
      ["Stalled", present[STALLED]],
      ["Recomputed", present[RECOMPUTED]],
      ["Prefill", present[PREFILL]],
      ["Decode", present[DECODE]],
      ["Swapped out", still(SWAPPED)],
      ["Preempted before", still(PREEMPTED)],
      ["Waiting", present[WAITING]],
    ];
    for (const [title, members] of groups) {
      if (!members || !members.length) continue;
      const list = element("ul");
      for (const [sequence, span] of members.slice(0, MOST_LISTED)) {
        list.append(
          element("li", this._link(sequence), ": ", this._short(sequence, span, column, title)),
        );
      }
      if (members.length > MOST_LISTED)
        list.append(element("li", `and ${count(members.length - MOST_LISTED)} more`));
      section.append(element("h3", `${title} (${count(members.length)})`), list);
    }
  }

  _ended(column) {
    const ended = [];
    this.app.model.sequences.forEach((sequence, index) => {
      if (sequence.ended === column) ended.push([index, -1]);
    });
    return ended;
  }

  _short(sequence, span, column, title) {
    const { model, words } = this.app;
    if (span < 0) return words.ending(model.sequences[sequence].end);
    const a = model.a[span],
      b = model.b[span],
      code = model.code[span];
    if (code === DECODE) {
      const [drafted, accepted] = model.draftCounts(sequence, column, column);
      const done = words.positions(a + column - model.first[span], 1 + accepted);
      return done + words.drafts(drafted, accepted);
    }
    if (isIdle(code)) return words.reason(a, column);
    return `${plural(b, "token")}, ${words.positions(a, b)}`;
  }

  // ---- a sequence ------------------------------------------------------------------------------

  _sequence(index, column) {
    const { model, words, theme } = this.app,
      { steps } = model,
      about = model.sequences[index],
      again = model.recomputed(index),
      [drafted, accepted] = model.draftCounts(index, 0, model.numColumns);
    const span = model.spanAt(index, column),
      state = element("p.state", words.state(index, column));
    if (span >= 0) state.style.borderColor = css(theme.states[model.code[span]]);
    const section = element(
      "section",
      element("h2", element("span.name", plain(about.name))),
      state,
    );
    const first = model.firstColumn(index),
      last = model.lastColumn(index);
    const done = about.end
      ? `${about.end}, in step ${count(steps.step[last])}`
      : "not finished here";
    section.append(
      this._facts([
        ["prompt", plural(about.prompt, "token")],
        ["\u2013 of these cached", about.cached ? count(about.cached) : null],
        ["new tokens, at most", count(about.max)],
        ["priority", about.priority || null],
        [
          "arrived",
          about.arrival === null
            ? null
            : `${about.arrival < 0 ? "" : "at "}${moment(about.arrival)}`,
        ],
        ["steps", `${count(steps.step[first])}\u2013${count(steps.step[last])}`],
        ["end", done],
        ["preemptions", about.preemptions ? count(about.preemptions) : null],
        ["tokens recomputed", again ? count(again) : null],
        ["tokens drafted", drafted ? count(drafted) : null],
        ["\u2013 of these accepted", drafted ? count(accepted) : null],
      ]),
    );
    this._losses(section, model.losses(index));
    if (about.parent !== null)
      section.append(
        element("p", "Forked from ", this._link(about.parent), ", whose prompt it shares."),
      );
    const stays = model.stays(index),
      rows = [];
    STATES.forEach((kind, code) => {
      if (stays[code])
        rows.push([
          kind.name,
          `${plural(stays[code].columns, "step")}, ${seconds(stays[code].seconds)}`,
        ]);
    });
    section.append(element("h3", "In all"), this._facts(rows));
    return section;
  }

  /** When a sequence lost its blocks, and to whom. */
  _losses(section, losses) {
    if (!losses.length) return;
    const { app } = this,
      list = element("ul");
    for (const [column, reason] of losses.slice(0, MOST_LISTED)) {
      const link = element("button.link", `step ${count(app.model.steps.step[column])}`);
      link.type = "button";
      link.addEventListener("click", () => {
        app.move({ column, pinned: true, block: null });
        app.reveal();
      });
      list.append(element("li", link, `: ${app.words.reason(reason)}`));
    }
    if (losses.length > MOST_LISTED)
      list.append(element("li", `and ${count(losses.length - MOST_LISTED)} more`));
    section.append(element("h3", "Lost its blocks"), list);
  }

  // ---- a block -----------------------------------------------------------------------------------

  _block(block, column) {
    const { model, words } = this.app,
      change = model.changeAt(block, column),
      { steps } = model;
    const holders = change < 0 ? [] : model.holders[change];
    const section = element(
      "section",
      element("h2", `Block ${count(block)}`),
      element("p.state", words.block(block, column)),
    );
    if (change >= 0)
      section.append(
        this._facts([["since step", count(steps.step[Math.max(model.changed[change], 0)])]]),
      );
    if (holders.length) {
      const list = element("ul");
      for (const sequence of holders.slice(0, MOST_LISTED))
        list.append(element("li", this._link(sequence)));
      if (holders.length > MOST_LISTED)
        list.append(element("li", `and ${count(holders.length - MOST_LISTED)} more`));
      section.append(list);
    }
    return section;
  }
}
