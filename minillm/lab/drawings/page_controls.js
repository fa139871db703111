"use strict";
/* Keys, pointer, wheel and buttons. */

class Controls {
  constructor(app) {
    this.app = app;
    this.tip = document.getElementById("tip");
    this._buttons();
    this._help();
    document.addEventListener("keydown", (event) => this._key(event));
    const { plot } = app;
    plot.addEventListener("wheel", (event) => this._wheel(event), { passive: false });
    plot.addEventListener("pointerdown", (event) => this._down(event));
    plot.addEventListener("pointermove", (event) => this._hover(event));
    plot.addEventListener("pointerleave", () => this._leave());
    plot.addEventListener("dblclick", (event) => this._double(event));
  }

  _buttons() {
    const { app } = this,
      on = (id, action) => document.getElementById(id).addEventListener("click", action);
    on("by-steps", () => app.setByTime(false));
    on("by-time", () => app.setByTime(true));
    on("zoom-in", () => app.zoom(0.5));
    on("zoom-out", () => app.zoom(2));
    on("show-all", () => app.show(0, app.scale.extent));
    on("rows-lower", () => app.resizeRows(-1));
    on("rows-higher", () => app.resizeRows(1));
    on("curves-button", () => this._curves());
    on("help-button", () => document.getElementById("help").showModal());
    on("help-close", () => document.getElementById("help").close());
    document
      .getElementById("sort")
      .addEventListener("change", (event) => app.setSort(event.target.value));
    const search = document.getElementById("search");
    search.addEventListener("input", () => app.search(search.value));
    search.addEventListener("keydown", (event) => {
      if (event.key === "Enter") app.search(search.value, event.shiftKey ? -1 : 1);
      if (event.key === "Escape") {
        search.value = "";
        app.search("");
        app.plot.focus();
      }
      event.stopPropagation();
    });
  }

  _help() {
    const list = (rows, tag) =>
      element(
        "dl",
        ...rows.flatMap(([keys, what]) => [
          element(
            "dt",
            ...keys.split(" ").flatMap((key) => [tag === "kbd" ? element("kbd", key) : key, " "]),
          ),
          element("dd", what),
        ]),
      );
    document
      .getElementById("help-text")
      .append(
        element(
          "p",
          "Every column is one step of the engine. A row of the upper panel is a request (or one of its completions, a sequence): what it did in each step, and why it waited. A row of the lower panel is a block of the KV cache: who held it when the step was over.",
        ),
        list(KEYS, "kbd"),
        list(POINTER, "text"),
        list(WORDS, "text"),
        element(
          "p",
          "Zoomed out, a pixel stands for many steps and shows the rarest thing in them: a preemption before a prefill, that before decode and waiting; of the curves, the highest value over a band down to the lowest.",
        ),
      );
  }

  // ---- keys --------------------------------------------------------------------------------------

  _key(event) {
    const { app } = this,
      ten = event.shiftKey ? 10 : 1;
    if (event.ctrlKey || event.metaKey || event.altKey || document.getElementById("help").open)
      return;
    const typing = event.target.matches("input, select, textarea");
    const arrows = app.plot === document.activeElement || document.activeElement === document.body;
    const moves = {
      ArrowLeft: () => app.step(-ten, 0),
      ArrowRight: () => app.step(ten, 0),
      ArrowUp: () => app.step(0, -ten),
      ArrowDown: () => app.step(0, ten),
      Home: () => app.goTo(0),
      End: () => app.goTo(app.model.numColumns - 1),
    };
    const letters = {
      "+": () => app.zoom(0.5),
      "=": () => app.zoom(0.5),
      "-": () => app.zoom(2),
      0: () => app.show(0, app.scale.extent),
      n: () => app.jump(1),
      p: () => app.jump(-1),
      t: () => app.setByTime(!app.scale.byTime),
      s: () => this._nextSort(),
      c: () => this._curves(),
      z: () => this._toSequence(app.cursor.sequence),
      "[": () => app.resizeRows(-1),
      "]": () => app.resizeRows(1),
      "/": () => document.getElementById("search").focus(),
      "?": () => document.getElementById("help").showModal(),
      Escape: () => app.release(),
    };
    const action = (arrows && moves[event.key]) || (!typing && letters[event.key]);
    if (!action || !app.model.numColumns) return;
    event.preventDefault();
    this.tip.hidden = true;
    action();
  }

  /** Show or hide the curves, which leaves more room for the rows. */
  _curves() {
    const bare = this.app.plot.classList.toggle("bare");
    document.getElementById("curves-button").setAttribute("aria-pressed", String(!bare));
    this.app.layout();
  }

  _nextSort() {
    const options = [...document.getElementById("sort").options].map((option) => option.value);
    this.app.setSort(options[(options.indexOf(this.app.sort) + 1) % options.length]);
  }

  _toSequence(sequence) {
    const { app } = this,
      { model, scale } = app;
    if (sequence === null) return;
    const from = scale.left(model.firstColumn(sequence)),
      to = scale.right(model.lastColumn(sequence));
    app.show(from - (to - from) * 0.06, to + (to - from) * 0.06);
  }

  // ---- pointer -----------------------------------------------------------------------------------

  /** What is under the pointer: panel, x from the left of the plot, column, sequence, block. */
  _at(event) {
    const { app } = this,
      target = event.target.closest("canvas"),
      box = app.plot.getBoundingClientRect();
    const x = event.clientX - box.left - app.gutter,
      inside = x >= 0 && x < app.scale.width;
    const found = {
      panel: target && target.id,
      x,
      inside,
      column: null,
      sequence: null,
      block: null,
      rank: null,
    };
    const unit = app.scale.unit(x);
    if (inside && unit < app.scale.extent && found.panel !== "overview")
      found.column = app.scale.columnAt(unit);
    if (!target) return found;
    const y = event.clientY - target.getBoundingClientRect().top;
    if (found.panel === "ranks") found.rank = app.curves.lanes.rankAt(y);
    if (found.panel === "gantt") {
      const row = app.gantt.rowAt(y);
      if (row !== null) found.sequence = app.gantt.sequenceAt(row, found.column);
    } else if (found.panel === "blocks" && found.column !== null) {
      const row = app.map.rowAt(y);
      if (row !== null && app.map.shown.length)
        Object.assign(found, this._block(row, found.column));
    }
    return found;
  }

  /** Of the blocks of a row the one that it shows, and its first holder. */
  _block(row, column) {
    const { map, model } = this.app,
      first = row * map.group;
    let block = map.shown[first],
      best = -1;
    for (const candidate of map.shown.slice(first, first + map.group)) {
      const rank = blockRank(map._code(model.changeAt(candidate, column)));
      if (rank > best) [block, best] = [candidate, rank];
    }
    const change = model.changeAt(block, column),
      holders = change < 0 ? [] : model.holders[change];
    const { pinned, sequence } = this.app.cursor;
    return {
      block,
      sequence: holders.length
        ? pinned && holders.includes(sequence)
          ? sequence
          : holders[0]
        : null,
    };
  }

  _hover(event) {
    const { app } = this;
    if (this.dragging) return;
    const found = this._at(event);
    app.plot.style.cursor = found.panel === "overview" ? this._overviewCursor(found.x) : "";
    if (found.column === null && found.sequence === null) return this._leave();
    if (!app.cursor.pinned)
      app.move({
        column: found.column ?? app.cursor.column,
        sequence: found.sequence,
        block: found.block,
      });
    this._tip(event, found);
  }

  _tip(event, { column, sequence, block, rank }) {
    const { model, words } = this.app,
      { tip } = this,
      lines = [];
    if (column === null) return void (tip.hidden = true);
    if (block !== null) lines.push(`Block ${count(block)}: ${words.block(block, column)}`);
    if (sequence !== null && block === null)
      lines.push(words.name(sequence), words.state(sequence, column));
    if (rank !== null)
      lines.push(`Rank ${rank}: ${words.rank(rank, column)}`, "computing + communicating or waiting");
    lines.push(`Step ${count(model.steps.step[column])} at ${moment(model.steps.start[column])}`);
    tip.replaceChildren(...lines.map((line) => element("div", line)));
    tip.hidden = false;
    const { offsetWidth, offsetHeight } = tip,
      x = event.clientX + 14,
      y = event.clientY + 16;
    tip.style.left = `${x + offsetWidth > innerWidth - 6 ? Math.max(4, event.clientX - offsetWidth - 12) : x}px`;
    tip.style.top = `${y + offsetHeight > innerHeight - 6 ? Math.max(4, event.clientY - offsetHeight - 12) : y}px`;
  }

  _leave() {
    this.tip.hidden = true;
    if (!this.app.cursor.pinned) this.app.move({ column: null, sequence: null, block: null });
  }

  _double(event) {
    const { sequence } = this._at(event);
    if (sequence !== null) this._toSequence(sequence);
  }

  /** A press becomes a click where it hardly moves, else a drag of its panel. */
  _down(event) {
    if (event.button !== 0 || !event.target.matches("canvas")) return;
    const { app } = this,
      { scale } = app,
      start = this._at(event),
      begun = [event.clientX, event.clientY];
    const view = [scale.from, scale.to],
      { scrollTop } = app.gantt;
    if (start.panel === "overview") return this._overview(event, start);
    const selecting = event.shiftKey && start.inside,
      target = event.target;
    let moved = false;
    this._drag(
      event,
      (now) => {
        const dx = now.clientX - begun[0],
          dy = now.clientY - begun[1];
        if (!moved && Math.hypot(dx, dy) < 4) return;
        moved = true;
        this.tip.hidden = true;
        if (selecting) return this._select(start.x, start.x + dx);
        const shift = (dx / scale.width) * (view[1] - view[0]);
        app.show(view[0] - shift, view[1] - shift, false);
        if (target.id === "gantt") app.gantt.scroller.scrollTop = scrollTop - dy;
      },
      (now) => {
        if (moved && selecting) {
          const ends = [start.x, start.x + now.clientX - begun[0]]
            .sort((a, b) => a - b)
            .map((x) => scale.unit(x));
          app.place();
          if (now.type === "pointerup") app.show(...ends);
        } else if (
          !moved &&
          now.type === "pointerup" &&
          (start.column !== null || start.sequence !== null)
        ) {
          app.plot.focus({ preventScroll: true });
          app.move({
            column: start.column ?? app.cursor.column ?? 0,
            sequence: start.sequence,
            block: start.block,
            pinned: true,
          });
        }
      },
    );
  }

  /** Show the range that is being dragged over. */
  _select(from, to) {
    const line = document.getElementById("cursor"),
      left = Math.min(from, to);
    line.hidden = false;
    line.style.cssText = `transform: translateX(${this.app.gutter + left}px); width: ${Math.abs(to - from)}px; height: ${this.app.plot.scrollHeight}px`;
  }

  _drag(event, move, end) {
    const target = event.target;
    this.dragging = true;
    target.setPointerCapture(event.pointerId);
    const finish = (now) => {
      this.dragging = false;
      target.removeEventListener("pointermove", move);
      for (const name of ["pointerup", "pointercancel"]) target.removeEventListener(name, finish);
      end?.(now);
    };
    target.addEventListener("pointermove", move);
    for (const name of ["pointerup", "pointercancel"]) target.addEventListener(name, finish);
  }

  // ---- overview and wheel --------------------------------------------------------------------------

  /** Which part of the window an x in the overview hits: "from", "to", "inside" or null. */
  _part(x) {
    const { scale, curves } = this.app,
      [from, to] = [scale.from, scale.to].map((unit) => curves.overviewScale.x(unit));
    if (Math.abs(x - from) <= 6) return "from";
    if (Math.abs(x - to) <= 6) return "to";
    return x > from && x < to && to - from < scale.width - 2 ? "inside" : null;
  }

  _overviewCursor(x) {
    return { from: "ew-resize", to: "ew-resize", inside: "grab" }[this._part(x)] ?? "crosshair";
  }

  _overview(event, start) {
    const { app } = this,
      { scale } = app,
      part = this._part(start.x),
      view = [scale.from, scale.to];
    const units = (dx) => (dx / scale.width) * scale.extent,
      begun = scale.extent * (start.x / scale.width);
    this._drag(
      event,
      (now) => {
        const dx = units(now.clientX - event.clientX);
        if (part === "inside") app.show(view[0] + dx, view[1] + dx, false);
        else if (part === "from") app.show(Math.min(view[0] + dx, view[1]), view[1], false);
        else if (part === "to") app.show(view[0], Math.max(view[1] + dx, view[0]), false);
        else if (Math.abs(now.clientX - event.clientX) > 3)
          app.show(...[begun, begun + dx].sort((a, b) => a - b), false);
      },
      (now) => {
        const span = scale.to - scale.from; // a click beside the window brings it there
        if (part === null && Math.abs(now.clientX - event.clientX) <= 3)
          app.show(begun - span / 2, begun + span / 2);
      },
    );
  }

  _wheel(event) {
    const { app } = this,
      { scale } = app,
      found = this._at(event);
    const pixels = event.deltaMode === 1 ? 16 : event.deltaMode === 2 ? 300 : 1;
    const sideways = event.shiftKey ? event.deltaX || event.deltaY : event.deltaX;
    const curves = found.panel && found.panel !== "gantt" && found.panel !== "blocks";
    if (
      event.ctrlKey ||
      event.metaKey ||
      (curves && !event.shiftKey && Math.abs(event.deltaY) > Math.abs(event.deltaX))
    ) {
      const limited = Math.min(Math.max(event.deltaY * pixels, -200), 200);
      app.zoom(
        Math.exp(limited * (event.ctrlKey && Math.abs(event.deltaY) < 20 ? 0.01 : 0.002)),
        Math.min(Math.max(found.x, 0), scale.width),
        false,
      );
    } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      const shift = ((sideways * pixels) / scale.width) * (scale.to - scale.from);
      app.show(scale.from + shift, scale.to + shift, false);
    } else return; // the browser scrolls
    event.preventDefault();
  }
}
