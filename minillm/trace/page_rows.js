"use strict";
/* The two panels of rows: the Gantt (a row per sequence) and the block map (a row per block). */

/** What both share: a canvas that stays in place while an empty box of the full height scrolls. */
class Rows {
  constructor(app, id) {
    this.app = app;
    this.canvas = document.getElementById(id);
    this.scroller = document.getElementById(`${id}-scroll`);
    this.extent = this.scroller.querySelector(".extent");
    this.raster = new Raster();
    this.rowHeight = 1; // CSS pixels, a multiple of a device pixel
    this.scroller.addEventListener("scroll", () => app.redraw());
  }

  get scrollTop() {
    return this.scroller.scrollTop;
  }

  /** The panel is `height` high and shows `count` rows of `rowHeight`. */
  layout(height, rowHeight, count) {
    const ratio = this.app.ratio;
    this.rowHeight = Math.max(1, Math.round(rowHeight * ratio)) / ratio;
    this.numRows = count;
    this.height = Math.round(height);
    this.scroller.style.height = `${this.height + 1}px`; // and its border
    this.extent.style.height = `${Math.max(0, Math.ceil(count * this.rowHeight) - this.height)}px`;
  }

  rowAt(y) {
    const row = Math.floor((y + this.scrollTop) / this.rowHeight);
    return row >= 0 && row < this.numRows ? row : null;
  }

  reveal(row) {
    const top = row * this.rowHeight, margin = Math.min(2 * this.rowHeight, this.height / 3);
    if (top < this.scrollTop + margin) this.scroller.scrollTop = top - margin;
    const bottom = top + this.rowHeight;
    if (bottom > this.scrollTop + this.height - margin) this.scroller.scrollTop = bottom - this.height + margin;
  }

  /** Paint the rows in view; `codes(row)` fills the raster's codes, `tile(code, height)` paints.
   * Rows lower than `least` get the pattern that runs through all of them. */
  paint(columns, codes, tile, least = 0) {
    const { app, raster } = this, { ratio } = app;
    const drawing = app.begin(this.canvas.id, app.gutter, this.height);
    raster.resize(columns.pixels, Math.round(this.height * ratio));
    raster.clear();
    const height = Math.round(this.rowHeight * ratio), scrolled = Math.round(this.scrollTop * ratio);
    const loose = height < least * ratio;
    this.firstRow = Math.floor(scrolled / height);
    this.lastRow = Math.min(this.numRows - 1, Math.floor((scrolled + raster.height - 1) / height));
    for (let row = this.firstRow; row <= this.lastRow; row++) {
      raster.codes.fill(0);
      codes(row);
      raster.row(row * height - scrolled, height, (code) => tile(code, loose ? LOOSE : height), loose);
    }
    drawing.context.putImageData(raster.image, Math.round(app.gutter * ratio), 0);
    return drawing;
  }

  top(row) {
    return row * this.rowHeight - this.scrollTop;
  }
}

class Gantt extends Rows {
  constructor(app) {
    super(app, "gantt");
    this.group = 1; // sequences per row
  }

  /** The sequence that a row shows at a column: of several one that is there, the last by state. */
  sequenceAt(row, column) {
    const { model, sort } = this.app, inRow = model.order(sort).slice(row * this.group, (row + 1) * this.group);
    const rank = (sequence) => {
      const span = column === null ? -1 : model.spanAt(sequence, column);
      return span < 0 ? 0 : model.code[span];
    };
    return inRow.sort((a, b) => rank(b) - rank(a))[0] ?? null;
  }

  draw(columns) {
    const { app } = this, { model, theme, ratio } = app;
    this.order = model.order(app.sort);
    const codes = (row) => {
      const to = Math.min((row + 1) * this.group, this.order.length);
      for (let place = row * this.group; place < to; place++) this._codes(this.order[place], columns, this.group > 1);
    };
    const { context } = this.paint(columns, codes, (code, height) => stateTile(theme, code, height, ratio));
    this._background(context);
    if (this.rowHeight < 9 || this.group > 1) return;
    for (let row = this.firstRow; row <= this.lastRow; row++) {
      const sequence = this.order[row], top = this.top(row);
      this._label(context, sequence, top);
      if (this.rowHeight >= 15) this._texts(context, sequence, top, columns);
      this._marks(context, sequence, top + this.rowHeight / 2);
    }
  }

  /** One code per pixel for a sequence. A span narrower than a pixel still gets one, and what
   * matters more wins; what is rare, and easily overlooked, gets two. */
  _codes(sequence, columns, merge) {
    const { model } = this.app, { bars } = model, { codes } = this.raster, { first, last, begin, end, pixels } = columns;
    const from = model.barOffsets[sequence], until = model.barOffsets[sequence + 1];
    const wide = (end[0] - begin[0] || end[end.length - 1] - begin[begin.length - 1]) >= 5;
    for (let bar = Math.max(lastAtMost(bars.first, first, from, until), from); bar < until && bars.first[bar] <= last; bar++) {
      if (bars.last[bar] < first) continue;
      const code = bars.code[bar], starts = bars.first[bar] >= first, ends = bars.last[bar] <= last;
      const start = begin[starts ? bars.first[bar] - first : 0];
      let stop = end[ends ? bars.last[bar] - first : last - first];
      const least = code >= PREFILL ? 2 * Math.round(this.app.ratio) : 1;
      if (stop - start < least) stop = Math.min(start + least, pixels);
      // What stands there already is the wide end of a narrow span, unless it is less important.
      const edge = merge ? stop : Math.min(stop, start + 4);
      for (let x = start; x < edge; x++) if (codes[x] < code || codes[x] >= DIVIDER) codes[x] = code;
      if (stop > edge) codes.fill(code, edge, stop);
      if (!wide) continue;
      if (ends && (code === PREFILL || code === RECOMPUTED)) codes[stop - 1] = DIVIDER;
      if (code === DECODE) this._ticks(bars.first[bar], bars.last[bar], columns);
    }
  }

  /** A fine line between the steps of a decode, where a step is some pixels wide. */
  _ticks(from, to, { first, last, begin, end }) {
    for (let c = Math.max(from, first); c <= Math.min(to, last); c++) {
      if (end[c - first] - begin[c - first] >= 5) this.raster.codes[end[c - first] - 1] = TICK;
    }
  }

  /** Gutter and a faint line under each row. Drawn below what is there already. */
  _background(context) {
    const { app } = this;
    context.globalCompositeOperation = "destination-over";
    if (this.rowHeight >= 9) {
      context.fillStyle = css(mix(app.theme.back, app.theme.line, 0.55));
      for (let row = this.firstRow; row <= this.lastRow; row++) {
        context.fillRect(0, this.top(row) + this.rowHeight - 1 / app.ratio, app.gutter + app.scale.width, 1 / app.ratio);
      }
    }
    context.globalCompositeOperation = "source-over";
  }

  /** Name and colour (of its blocks) of a row. */
  _label(context, sequence, top) {
    const { app } = this, middle = top + this.rowHeight / 2;
    const size = Math.min(12, this.rowHeight - 1.5), chosen = sequence === app.cursor.sequence;
    context.fillStyle = css(app.theme.owner(sequence));
    context.fillRect(14, middle - size * 0.35, size * 0.7, size * 0.7);
    context.font = `${chosen ? "bold " : ""}${size}px ${FONT}`;
    context.textBaseline = "middle";
    context.fillStyle = css(app.theme.ink);
    const found = app.matches.has(sequence);
    if (found) {
      context.fillStyle = css(mix(app.theme.back, rgb("#F0E442"), app.theme.dark ? 0.35 : 0.7));
      context.fillRect(26, top + 1, app.gutter - 32, this.rowHeight - 2);
      context.fillStyle = css(app.theme.ink);
    }
    context.fillText(fitted(context, app.model.sequences[sequence].name, app.gutter - 38), 28, middle + 0.5);
  }

  /** What a span says, where there is room for it. */
  _texts(context, sequence, top, columns) {
    const { app } = this, { model, scale, theme } = app, middle = top + this.rowHeight / 2 + 0.5;
    const end = model.offsets[sequence + 1];
    context.font = `10.5px ${FONT}`;
    let span = Math.max(lastAtMost(model.first, columns.first, model.offsets[sequence], end), model.offsets[sequence]);
    for (; span < end && model.first[span] <= columns.last; span++) {
      const from = Math.max(0, scale.x(scale.left(model.first[span])));
      const room = Math.min(scale.width, scale.x(scale.right(model.last[span]))) - from;
      if (room < 22) continue;
      const code = model.code[span], idle = isIdle(code);
      if (idle && room < 90) continue;
      let text = count(model.b[span]);
      if (code === DECODE) text = plural(model.last[span] - model.first[span] + 1, "token");
      if (idle) text = app.words.reason(model.a[span]);
      const width = Math.min(context.measureText(text).width, room - 16), x = app.gutter + from + 6;
      if (width < 6 || (!idle && context.measureText(text).width > room - 10)) continue;
      const colour = theme.states[code];
      if (idle || code === RECOMPUTED) {
        context.fillStyle = css(idle ? theme.back : colour);
        context.fillRect(x - 2, middle - 6.5, width + 4, 13);
      }
      context.fillStyle = idle ? css(theme.muted) : readable(colour);
      context.fillText(idle ? fitted(context, text, width + 1) : text, x, middle);
    }
  }

  /** Where a sequence arrived, and how it ended: a mark beside its bar. */
  _marks(context, sequence, middle) {
    const { app } = this, { model, scale, gutter, theme } = app, about = model.sequences[sequence];
    const size = Math.min(4, this.rowHeight / 3.2), forked = about.parent !== null; // it never arrived
    const arrived = scale.byTime && about.arrival !== null ? about.arrival : scale.left(model.firstColumn(sequence));
    const x = scale.x(arrived);
    context.lineWidth = 1.4;
    context.strokeStyle = context.fillStyle = css(theme.ink);
    if (!forked && scale.byTime && arrived < model.begin[model.firstColumn(sequence)]) { // before the step began
      const to = Math.min(scale.x(model.begin[model.firstColumn(sequence)]), scale.width);
      context.fillStyle = css(theme.states[WAITING]);
      if (to > Math.max(x, 0)) context.fillRect(gutter + Math.max(x, 0), middle - 1, to - Math.max(x, 0), 2);
    }
    if (!forked && x >= -1 && x <= scale.width) drawMark(context, "arrival", gutter + x, middle, size, theme);
    const done = scale.x(scale.right(model.lastColumn(sequence)));
    if (about.end && done >= 0 && done + 2 * size <= scale.width + 1) drawMark(context, about.end, gutter + done + size + 2, middle, size, theme);
  }
}

/** The marks; the legend draws them with this, too. */
function drawMark(context, kind, x, y, size, theme) {
  context.strokeStyle = context.fillStyle = css(kind === "error" || kind === "abort" ? theme.alarm : theme.ink);
  context.lineWidth = 1.4;
  context.beginPath();
  if (kind === "arrival") { // a pole with a flag, left of what follows
    context.moveTo(x - 1, y - size * 1.5);
    context.lineTo(x - 1, y + size * 1.5);
    context.stroke();
    context.beginPath();
    context.moveTo(x - 1, y - size * 1.5);
    context.lineTo(x - 1 - size * 1.4, y - size * 0.9);
    context.lineTo(x - 1, y - size * 0.2);
    context.fill();
  } else if (kind === "stop") {
    context.arc(x, y, size * 0.9, 0, 7);
    context.fill();
  } else if (kind === "length") {
    context.fillRect(x - size * 0.85, y - size * 0.85, size * 1.7, size * 1.7);
  } else if (kind === "abort") {
    for (const sign of [1, -1]) {
      context.moveTo(x - size * 0.9, y - sign * size * 0.9);
      context.lineTo(x + size * 0.9, y + sign * size * 0.9);
    }
    context.lineWidth = 2;
    context.stroke();
  } else { // error: a diamond
    context.moveTo(x, y - size * 1.25);
    context.lineTo(x + size * 1.25, y);
    context.lineTo(x, y + size * 1.25);
    context.lineTo(x - size * 1.25, y);
    context.fill();
  }
}

/** A text cut to a width, isolated, so that a right-to-left name cannot reach out of its place. */
function fitted(context, text, width) {
  text = plain(text).slice(0, 200);
  if (context.measureText(text).width <= width) return isolated(text);
  let from = 0, to = text.length;
  while (from < to) {
    const middle = (from + to + 1) >> 1;
    if (context.measureText(`${text.slice(0, middle)}\u2026`).width <= width) from = middle;
    else to = middle - 1;
  }
  return isolated(`${text.slice(0, from)}\u2026`);
}

class BlockMap extends Rows {
  constructor(app) {
    super(app, "blocks");
    this.group = 1; // blocks per row
    this.shown = app.model.shownBlocks();
    const { holders } = app.model; // the code of each change while no sequence is in the light
    this._plain = Uint16Array.from(holders, (held) => (held.length ? (held.length > 1 ? SHARED : OWNED) + (held[0] % HUES) : USED));
    this._runs = Array.from({ length: 6 }, () => new Int32Array(3072)); // of a row, by rank: code, from, to, ...
    this._numRuns = new Int32Array(6);
  }

  draw(columns) {
    const { app } = this, { theme, ratio } = app;
    const { context, width } = this.paint(columns, (row) => this._codes(row, columns),
      (code, height) => blockTile(theme, code, height, ratio), 6);
    this._scaleMarks(context);
    if (this.rowHeight >= 8 && this.group === 1) {
      for (let row = this.firstRow; row <= this.lastRow; row++) this._texts(context, row, columns, width);
    }
  }

  /** The code of a change: who holds the block, and is it in the light? */
  _code(change) {
    if (change < 0) return 0;
    const chosen = this.app.highlighted;
    if (chosen === null) return this._plain[change];
    const holders = this.app.model.holders[change];
    if (!holders.length) return USED;
    const dim = holders.includes(chosen) ? 0 : DIM, owner = dim ? holders[0] : chosen;
    return (holders.length > 1 ? SHARED : OWNED) + (owner % HUES) + dim;
  }

  /** One code per pixel for the blocks of a row; of several the most telling one. The runs of all
   * blocks are filled in order of rank, and held blocks are counted by where runs begin and end, so
   * that the cost is that of the changes, not of blocks times pixels. */
  _codes(row, columns) {
    const { codes, held, shared } = this.raster, to = Math.min((row + 1) * this.group, this.shown.length);
    this._numRuns.fill(0);
    held.fill(0);
    shared.fill(0);
    for (let place = to - 1; place >= row * this.group; place--) this._blockRuns(this.shown[place], columns); // the first wins
    for (let rank = 1; rank < this._runs.length; rank++) {
      const runs = this._runs[rank], length = this._numRuns[rank];
      for (let i = 0; i < length; i += 3) {
        const code = runs[i], to = runs[i + 2];
        for (let x = runs[i + 1]; x < to; x++) codes[x] = code; // most are short
      }
    }
    if (this.group > 1) this._quarters(to - row * this.group);
  }

  /** The stretches of pixels in which a block has one code, by rank. */
  _blockRuns(block, { first, last, begin, end, pixels }) {
    const { model } = this.app, { held, shared } = this.raster, until = model.blockOffsets[block + 1];
    let change = model.changeAt(block, first), column = first;
    while (column <= last) {
      const following = change < 0 ? model.blockOffsets[block] : change + 1;
      const stop = following < until ? Math.min(model.changed[following], last + 1) : last + 1;
      const code = this._code(change), from = begin[column - first];
      let to = end[stop - 1 - first];
      if ((code & 63) >= SHARED && to === from) to = Math.min(from + 1, pixels);
      if (code && to > from) {
        this._push(blockRank(code), code, from, to);
        if ((code & 63) >= OWNED) {
          held[from]++;
          held[to]--;
        }
        if ((code & 63) >= SHARED) {
          shared[from]++;
          shared[to]--;
        }
      }
      change = following;
      column = stop;
    }
  }

  /** Note a run. Arrays of numbers that only ever grow, because a frame notes 100,000 of them. */
  _push(rank, code, from, to) {
    const at = this._numRuns[rank];
    if (at + 3 > this._runs[rank].length) {
      const larger = new Int32Array(2 * this._runs[rank].length);
      larger.set(this._runs[rank]);
      this._runs[rank] = larger;
    }
    const runs = this._runs[rank];
    runs[at] = code;
    runs[at + 1] = from;
    runs[at + 2] = to;
    this._numRuns[rank] = at + 3;
  }

  /** Say how much of a row is held, in quarters. It counts as shared if most of that is. */
  _quarters(size) {
    const { codes, held, shared } = this.raster;
    for (let x = 0, numHeld = 0, numShared = 0; x < codes.length; x++) {
      numHeld += held[x];
      numShared += shared[x];
      const kind = codes[x] & 63;
      if (kind < OWNED) continue;
      if (kind >= SHARED && 2 * numShared < numHeld) codes[x] -= HUES;
      codes[x] |= (LEVELS - Math.min(LEVELS, Math.ceil((numHeld / size) * LEVELS))) << 6;
    }
  }

  /** Number of holders of shared blocks, and the name of the only one, where there is room. */
  _texts(context, row, columns, width) {
    const { app } = this, { model, scale, theme } = app, block = this.shown[row], until = model.blockOffsets[block + 1];
    const middle = this.top(row) + this.rowHeight / 2;
    context.font = `${Math.min(10.5, this.rowHeight + 1)}px ${FONT}`;
    context.textBaseline = "middle";
    let change = Math.max(model.changeAt(block, columns.first), model.blockOffsets[block]);
    for (; change < until && model.changed[change] <= columns.last; change++) {
      const holders = model.holders[change], shared = holders.length > 1;
      if (!holders.length) continue;
      const next = change + 1 < until ? model.changed[change + 1] : model.numColumns;
      const from = Math.max(0, scale.x(scale.left(model.changed[change])));
      const room = Math.min(scale.width, scale.x(scale.right(next - 1))) - from;
      if (room < (shared ? 18 : 46) || (!shared && this.rowHeight < 11)) continue;
      const text = shared ? `\u00d7${holders.length}` : fitted(context, model.sequences[holders[0]].name, room - 8);
      const wide = context.measureText(text).width, x = app.gutter + from + 4;
      const dim = this._code(change) & DIM, colour = theme.owner(holders[0]);
      if (dim) continue;
      if (shared) {
        context.fillStyle = css(theme.back);
        context.fillRect(x - 2, middle - this.rowHeight / 2, wide + 4, this.rowHeight - 1);
      }
      context.fillStyle = shared ? css(theme.ink) : readable(colour);
      context.fillText(text, x, middle + 0.5);
    }
  }

  /** Numbers of the blocks beside the map. */
  _scaleMarks(context) {
    const { app } = this, each = Math.max(1, Math.ceil(13 / this.rowHeight));
    const step = ticks(0, each * this.group, 1, 1).step;
    context.font = `${Math.min(11, Math.max(9, this.rowHeight))}px ${FONT}`;
    context.textBaseline = "middle";
    context.textAlign = "right";
    context.fillStyle = css(app.theme.muted);
    for (let place = 0; place < this.shown.length; place += step) {
      const row = place / this.group, y = this.top(row) + Math.min(this.rowHeight, this.rowHeight / this.group) / 2;
      if (y > -8 && y < this.height + 8) context.fillText(count(this.shown[place]), app.gutter - 8, Math.max(y, 6));
    }
    context.textAlign = "left";
  }
}

/** Order of what a row of several blocks shows: 0 free, 1 used, 2 held, 3 shared; what is in the light
 * of a chosen sequence comes before all that is dimmed. */
function blockRank(code) {
  const kind = code & 63;
  if (kind < OWNED) return kind;
  return (kind >= SHARED ? 3 : 2) + (code & DIM ? 0 : 2);
}
