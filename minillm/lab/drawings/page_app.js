"use strict";
/* The page: layout, what is drawn when, and how keys and the pointer move the view and the cursor.
 *
 * One cursor (column, sequence, block) is what the details panel tells. The pointer moves it; a
 * click, or any key, pins it; Escape lets it go. Moving it only moves two boxes over the canvases,
 * so that hovering redraws nothing. A redraw waits for the next frame, however many events ask.
 */

// Of the Gantt; 0 shows all sequences, several in a row if there are more than pixels.
const ROW_HEIGHTS = [0, 1, 2, 3, 4, 6, 9, 12, 16, 20, 24];
const MANY = 300; // sequences: from here on the first view shows all rather than readable names

class App {
  constructor(model) {
    this.model = model;
    this.words = new Words(model);
    this.scale = new Scale(model);
    this.sort = "arrival";
    this.cursor = { column: null, sequence: null, block: null, pinned: false };
    this.matches = new Set(); // sequences that the search has found
    this.highlighted = null; // the sequence whose blocks are in the light
    this.chosenHeight = null; // of the rows, if the reader has chosen one
    this.grown = 0; // the height that follows the view, where there are many
    this.frames = []; // milliseconds of the last redraws, for those who measure
    this.plot = document.getElementById("plot");
    this.still = matchMedia("(prefers-reduced-motion: reduce)");
    this.night = matchMedia("(prefers-color-scheme: dark)");
    this.gantt = new Gantt(this);
    this.map = new BlockMap(this);
    this.curves = new Curves(this);
    this.details = new Details(this);
    showHeader(model);
    this._restyle();
    this.night.addEventListener("change", () => this._restyle());
    new ResizeObserver(() => this.layout()).observe(this.plot);
    this.controls = new Controls(this);
    this.layout();
    this.details.show();
  }

  _restyle() {
    this.theme = new Theme(this.night.matches);
    this.curves.colour(this.theme);
    showLegends(this.theme, this.model);
    this.redraw();
    this.details.show();
  }

  // ---- layout and drawing --------------------------------------------------------------------

  /** Share the height among the panels: as much as rows can use, and no panel too small to read. */
  layout() {
    this.ratio = window.devicePixelRatio || 1;
    this.gutter = document.querySelector(".gutter").offsetWidth;
    this.scale.width = Math.max(50, this.plot.clientWidth - this.gutter - this._scrollbar());
    this.plot.style.removeProperty("--more");
    const others = [...this.plot.children].filter((child) => child.matches(".lane, .caption"));
    const room =
      this.plot.clientHeight - others.reduce((sum, child) => sum + child.offsetHeight, 0) - 2;
    const sequences = Math.max(1, this.model.sequences.length),
      blocks = Math.max(1, this.map.shown.length);
    const chosen = this.chosenHeight ?? (sequences > MANY ? this.grown : null);
    const generous = this.chosenHeight ?? (sequences > MANY ? 3 : 20); // the panel keeps its height while rows grow
    const low = Math.max(90, Math.min(blocks * 16, room * 0.4));
    const wanted = sequences * (generous || 3) + 4,
      least = Math.min(130, Math.max(70, room - low)), // where it is cramped, a part of both
      high = Math.min(wanted, Math.max(least, room - low));
    const rest = Math.max(Math.min(90, blocks * 22 + 2), Math.min(blocks * 22 + 2, room - high));
    this.gantt.group =
      chosen === 0 ? Math.max(1, Math.ceil(sequences / Math.floor(high * this.ratio))) : 1;
    const numRows = Math.ceil(sequences / this.gantt.group),
      fitting = Math.max(1, Math.floor((high / numRows) * this.ratio)) / this.ratio;
    this.gantt.layout(
      high,
      chosen === 0 ? fitting : (chosen ?? Math.min(20, Math.max(12, high / sequences))),
      numRows,
    );
    const thin = 1 / this.ratio; // a row of the map is a device pixel at least
    this.map.group = Math.max(1, Math.ceil((blocks * Math.max(thin, 1)) / rest));
    const rows = Math.ceil(blocks / this.map.group);
    const spare =
      this.plot.clientHeight < 500 ? 0 : Math.min(Math.max((room - high - rest) / 4, 0), 60); // for the curves
    this.plot.style.setProperty("--more", `${Math.floor(spare)}px`);
    this.map.layout(
      rest,
      Math.min(22, Math.max(thin, Math.floor((rest / rows) * this.ratio) / this.ratio)),
      rows,
    );
    const grouped = this.map.group > 1 ? `, ${this.map.group} per row` : "";
    const { numBlocks } = this.model,
      number =
        blocks < numBlocks
          ? `${count(blocks)} used of ${count(numBlocks)}`
          : numBlocks
            ? count(numBlocks)
            : "not recorded";
    document.getElementById("blocks-title").textContent = `Blocks (${number}${grouped})`;
    const crowded = this.gantt.group > 1 ? `, ${this.gantt.group} per row` : "";
    document.getElementById("gantt-title").textContent =
      `${this.model.rowName()} (${count(this.model.sequences.length)}${crowded})`;
    this.redraw();
  }

  /** Width of the scroll bar of a panel of rows, which the other panels leave free. */
  _scrollbar() {
    return Math.max(
      0,
      this.gantt.scroller.offsetWidth - this.gantt.scroller.clientWidth,
      this.map.scroller.offsetWidth - this.map.scroller.clientWidth,
    );
  }

  /** A cleared canvas of the plot's width (and a gutter), scaled so that one unit is a CSS pixel. */
  begin(id, gutter, height = null) {
    const canvas = document.getElementById(id),
      { ratio } = this; // a hidden one is no trouble
    const tall = height ?? canvas.clientHeight,
      width = this.scale.width;
    const pixels = [Math.round((width + gutter) * ratio), Math.round(tall * ratio)];
    if (canvas.width !== pixels[0] || canvas.height !== pixels[1])
      [canvas.width, canvas.height] = pixels;
    if (height !== null) canvas.style.cssText = `width: ${width + gutter}px; height: ${tall}px`;
    else canvas.style.cssText = `flex: none; width: ${width}px`;
    const context = canvas.getContext("2d");
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.clearRect(0, 0, ...pixels);
    context.scale(ratio, ratio);
    return { context, width, height: tall };
  }

  redraw() {
    this._pending ??= requestAnimationFrame(() => {
      this._pending = null;
      this.draw();
    });
  }

  draw() {
    if (!this.model.numColumns || !this.ratio) return;
    const started = performance.now(),
      columns = this.scale.columns(this.ratio);
    this.curves.overview();
    this.curves.ruler();
    this.curves.draw(columns);
    this.gantt.draw(columns);
    this.map.draw(columns);
    this.place();
    this.frames.push(performance.now() - started);
    if (this.frames.length > 500) this.frames.shift();
  }

  /** Put the cursor's box over its column, and the band over its row. */
  place() {
    const { column, sequence, pinned } = this.cursor,
      line = document.getElementById("cursor");
    const { scale } = this,
      band = document.getElementById("band");
    line.hidden = column === null;
    if (column !== null) {
      const from = Math.max(0, scale.x(scale.left(column))),
        to = Math.min(scale.width, scale.x(scale.right(column)));
      line.hidden = to < 0 || from > scale.width;
      line.classList.toggle("pinned", pinned);
      line.style.cssText = `transform: translateX(${this.gutter + from}px); width: ${Math.max(2, to - from)}px; height: ${this.plot.scrollHeight}px`;
    }
    const row = sequence === null || !this.gantt.order ? -1 : this.rowOf(sequence),
      top = this.gantt.top(row);
    const shown = Math.max(0, top),
      height = Math.min(top + this.gantt.rowHeight, this.gantt.height) - shown;
    band.hidden = row < 0 || height <= 0;
    band.style.cssText = `left: 0; width: ${this.gutter + scale.width}px; height: ${Math.max(height, 2)}px; transform: translateY(${this.gantt.scroller.offsetTop + shown}px)`;
  }

  /** The row that a sequence is drawn in. */
  rowOf(sequence) {
    return Math.floor(this.model.order(this.sort).indexOf(sequence) / this.gantt.group);
  }

  // ---- the view --------------------------------------------------------------------------------

  /** Show a range of the axis, with a short movement unless the reader wants none. */
  show(from, to, smooth = true) {
    const { scale } = this,
      before = [scale.from, scale.to];
    scale.show(from, to);
    const after = [scale.from, scale.to];
    cancelAnimationFrame(this._motion);
    this._goal = null;
    this._follow(...after);
    if (!smooth || this.still.matches) return this.redraw();
    this._goal = after;
    const began = performance.now();
    const move = () => {
      const share = (performance.now() - began) / 140,
        eased = share * (2 - share);
      if (share >= 1) return this._arrive();
      [scale.from, scale.to] = before.map((value, i) => value + (after[i] - value) * eased);
      this._motion = requestAnimationFrame(move);
      this.redraw();
    };
    move();
  }

  /** End a movement of the view where it was to end. */
  _arrive() {
    cancelAnimationFrame(this._motion);
    if (this._goal) [this.scale.from, this.scale.to] = this._goal;
    this._goal = null;
    this.redraw();
  }

  /** Requests come one after the other, so a view of some steps concerns some rows. If all rows in
   * sight are empty, scroll to the first that is not; and rows without a chosen size, of too many
   * sequences to read them all, grow as far as those in the view leave room. */
  _follow(from, to) {
    const { model, gantt, scale } = this,
      order = model.order(this.sort);
    const first = scale.columnAt(from),
      last = scale.columnAt(to);
    const alive = (sequence) =>
      model.firstColumn(sequence) <= last && model.lastColumn(sequence) >= first;
    const place = order.findIndex(alive);
    if (place < 0) return;
    let moved = !order
      .slice(gantt.firstRow * gantt.group, (gantt.lastRow + 1) * gantt.group)
      .some(alive);
    if (this.chosenHeight === null && order.length > MANY) {
      const number = order.findLastIndex(alive) - place + 1;
      const height = ROW_HEIGHTS.findLast((size) => size <= 16 && size * number <= gantt.height);
      if (height !== this.grown) {
        this.grown = height;
        this.layout();
        moved = true;
      }
    }
    if (moved) gantt.scroller.scrollTop = Math.floor(place / gantt.group) * gantt.rowHeight;
  }

  zoom(factor, x = null, smooth = true) {
    const { scale } = this;
    this._arrive(); // a second press counts from where the first one leads
    if (x === null) {
      // about the cursor, if that is in view
      const { column } = this.cursor,
        at = column === null ? -1 : scale.x(scale.left(column));
      x = at >= 0 && at <= scale.width ? at : scale.width / 2;
    }
    const about = scale.unit(x),
      least = scale.byTime ? scale.extent / this.model.numColumns : 4;
    const span = Math.min(Math.max((scale.to - scale.from) * factor, least), scale.extent);
    const from = about - (x / scale.width) * span;
    this.show(from, from + span, smooth);
  }

  setByTime(byTime) {
    this._arrive();
    this.scale.setByTime(byTime);
    document.getElementById("by-steps").setAttribute("aria-pressed", String(!byTime));
    document.getElementById("by-time").setAttribute("aria-pressed", String(byTime));
    document.getElementById("ruler-title").textContent = byTime ? "Time" : "Step";
    this.redraw();
  }

  setSort(sort) {
    this.sort = sort;
    document.getElementById("sort").value = sort;
    if (this.cursor.sequence !== null) this.gantt.reveal(this.rowOf(this.cursor.sequence));
    this.redraw();
  }

  /** Rows one size lower or higher. */
  resizeRows(direction) {
    const now = this.chosenHeight === 0 || this.gantt.group > 1 ? 0 : this.gantt.rowHeight;
    const sizes = direction > 0 ? ROW_HEIGHTS : [...ROW_HEIGHTS].reverse();
    const next = sizes.find((size) => (size - now) * direction > 0.5);
    if (next === undefined) return;
    this.chosenHeight = next;
    this.layout();
    if (this.cursor.sequence !== null) this.gantt.reveal(this.rowOf(this.cursor.sequence));
  }

  // ---- the cursor --------------------------------------------------------------------------------

  /** Move the cursor. `change` has what differs; a cursor moved by a key or a click is pinned. */
  move(change) {
    const before = this.cursor,
      cursor = (this.cursor = { ...before, ...change });
    if (["column", "sequence", "block", "pinned"].every((name) => before[name] === cursor[name]))
      return;
    const light = cursor.sequence;
    if (light !== this.highlighted || before.sequence !== cursor.sequence) {
      this.highlighted = cursor.pinned || cursor.block !== null ? light : null;
      this.redraw();
    }
    this._telling ??= requestAnimationFrame(() => {
      this._telling = null;
      this.place();
      this.details.show();
      this.curves.values(this.cursor.column);
    });
    if (cursor.pinned) this._say();
  }

  /** Tell screen readers, but not every step of a held key. */
  _say() {
    clearTimeout(this._saying);
    this._saying = setTimeout(() => {
      const { column, sequence, block } = this.cursor;
      if (column !== null)
        document.getElementById("live").textContent = this.words.spoken(column, sequence, block);
    }, 120);
  }

  /** Choose a sequence; the cursor goes to where it is, if it is not there at the cursor's step. */
  select(sequence) {
    let column = this.cursor.column ?? this.model.firstColumn(sequence);
    column = Math.min(
      Math.max(column, this.model.firstColumn(sequence)),
      this.model.lastColumn(sequence),
    );
    this.move({ sequence, column, block: null, pinned: true });
    this.reveal();
  }

  /** Bring the cursor into view. */
  reveal() {
    const { column, sequence } = this.cursor,
      { scale } = this;
    if (sequence !== null) this.gantt.reveal(this.rowOf(sequence));
    const from = scale.left(column),
      to = scale.right(column),
      span = scale.to - scale.from;
    if (from < scale.from) this.show(from - span * 0.1, from + span * 0.9);
    else if (to > scale.to) this.show(to - span * 0.9, to + span * 0.1);
    this.redraw();
  }

  release() {
    this.move({ sequence: null, block: null, pinned: false });
    document.getElementById("live").textContent = "Released.";
  }

  goTo(column) {
    this.move({ column, pinned: true });
    this.reveal();
  }

  /** Move the cursor by columns and rows, as the arrow keys do. */
  step(columns, rows) {
    const { scale, model, cursor } = this,
      order = model.order(this.sort);
    const start = cursor.column ?? scale.columnAt(columns < 0 ? scale.to : scale.from);
    const column =
      cursor.column === null && columns
        ? start
        : Math.min(Math.max(start + columns, 0), model.numColumns - 1);
    let { sequence } = cursor;
    if (rows && order.length) {
      const { firstRow, lastRow, group } = this.gantt,
        outside = rows > 0 ? firstRow * group - 1 : (lastRow + 1) * group;
      const place = sequence === null ? outside : order.indexOf(sequence);
      sequence = order[Math.min(Math.max(place + rows, 0), order.length - 1)];
    }
    this.move({ column, sequence, block: rows ? null : cursor.block, pinned: true });
    this.reveal();
  }

  /** To the next or previous preemption or refusal of the chosen sequence, or preemption of any. */
  jump(direction) {
    const { model, cursor } = this,
      { sequence } = cursor;
    const columns =
      sequence === null
        ? [...model.preemptedAt.keys()].sort((a, b) => a - b)
        : model.events(sequence);
    const at = cursor.column ?? -1;
    const next =
      direction > 0
        ? columns.find((column) => column > at)
        : columns.findLast((column) => column < at);
    if (next === undefined) {
      const what = sequence === null ? "preemption" : "preemption or refusal of this request";
      document.getElementById("live").textContent =
        `No ${direction > 0 ? "later" : "earlier"} ${what}.`;
      return;
    }
    this.move({ column: next, pinned: true, block: null });
    this.reveal();
  }

  /** Find requests by a part of their name; the first one from the cursor on is chosen. */
  search(text, direction = 0) {
    const wanted = text.trim().toLowerCase(),
      order = this.model.order(this.sort);
    const found = wanted
      ? order.filter((i) => this.model.sequences[i].name.toLowerCase().includes(wanted))
      : [];
    this.matches = new Set(found);
    const at = found.indexOf(this.cursor.sequence);
    const next = found.length ? (at < 0 ? 0 : (at + direction + found.length) % found.length) : -1;
    document.getElementById("found").textContent = wanted
      ? found.length
        ? `${next + 1} of ${count(found.length)}`
        : "none"
      : "";
    if (next >= 0) this.select(found[next]);
    this.redraw();
  }
}
