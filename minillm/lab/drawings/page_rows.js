"use strict";
/* Panels of rows, and the first of the two: the Gantt, a row per sequence. */

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
    const top = row * this.rowHeight,
      margin = Math.min(2 * this.rowHeight, this.height / 3);
    if (top < this.scrollTop + margin) this.scroller.scrollTop = top - margin;
    const bottom = top + this.rowHeight;
    if (bottom > this.scrollTop + this.height - margin)
      this.scroller.scrollTop = bottom - this.height + margin;
  }

  /** Paint the rows in view; `codes(row)` fills the raster's codes, `tile(code, height)` paints.
   * Rows lower than `least` get the pattern that runs through all of them. */
  paint(columns, codes, tile, least = 0) {
    const { app, raster } = this,
      { ratio } = app;
    const drawing = app.begin(this.canvas.id, app.gutter, this.height);
    raster.resize(columns.pixels, Math.round(this.height * ratio));
    raster.clear();
    const height = Math.round(this.rowHeight * ratio),
      scrolled = Math.round(this.scrollTop * ratio);
    const loose = height < least * ratio;
    this.firstRow = Math.floor(scrolled / height);
    this.lastRow = Math.min(this.numRows - 1, Math.floor((scrolled + raster.height - 1) / height));
    for (let row = this.firstRow; row <= this.lastRow; row++) {
      raster.codes.fill(0);
      codes(row);
      raster.row(
        row * height - scrolled,
        height,
        (code) => tile(code, loose ? LOOSE : height),
        loose,
      );
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
    const { model, sort } = this.app,
      inRow = model.order(sort).slice(row * this.group, (row + 1) * this.group);
    const rank = (sequence) => {
      const span = column === null ? -1 : model.spanAt(sequence, column);
      return span < 0 ? 0 : model.code[span];
    };
    return inRow.sort((a, b) => rank(b) - rank(a))[0] ?? null;
  }

  draw(columns) {
    const { app } = this,
      { model, theme, ratio } = app;
    this.order = model.order(app.sort);
    const codes = (row) => {
      const to = Math.min((row + 1) * this.group, this.order.length);
      for (let place = row * this.group; place < to; place++)
        this._codes(this.order[place], columns, this.group > 1);
    };
    const { context } = this.paint(columns, codes, (code, height) =>
      stateTile(theme, code, height, ratio),
    );
    this._background(context);
    if (this.rowHeight < 9 || this.group > 1) return;
    for (let row = this.firstRow; row <= this.lastRow; row++) {
      const sequence = this.order[row],
        top = this.top(row);
      this._label(context, sequence, top);
      if (this.rowHeight >= 15) this._texts(context, sequence, top, columns);
      this._drafts(context, sequence, top, columns);
      this._marks(context, sequence, top + this.rowHeight / 2);
    }
  }

  /** One code per pixel for a sequence. A span narrower than a pixel still gets one, and what
   * matters more wins; what is rare, and easily overlooked, gets two. */
  _codes(sequence, columns, merge) {
    const { model } = this.app,
      { bars } = model,
      { codes } = this.raster,
      { first, last, begin, end, pixels } = columns;
    const from = model.barOffsets[sequence],
      until = model.barOffsets[sequence + 1];
    const wide = (end[0] - begin[0] || end[end.length - 1] - begin[begin.length - 1]) >= 5;
    for (
      let bar = Math.max(lastAtMost(bars.first, first, from, until), from);
      bar < until && bars.first[bar] <= last;
      bar++
    ) {
      if (bars.last[bar] < first) continue;
      const code = bars.code[bar],
        starts = bars.first[bar] >= first,
        ends = bars.last[bar] <= last;
      const start = begin[starts ? bars.first[bar] - first : 0];
      let stop = end[ends ? bars.last[bar] - first : last - first];
      const least = code >= PREFILL ? 2 * Math.round(this.app.ratio) : 1;
      if (stop - start < least) stop = Math.min(start + least, pixels);
      // What stands there already is the wide end of a narrow span, unless it is less important.
      const edge = merge ? stop : Math.min(stop, start + 4);
      for (let x = start; x < edge; x++)
        if (codes[x] < code || codes[x] >= DIVIDER) codes[x] = code;
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
        context.fillRect(
          0,
          this.top(row) + this.rowHeight - 1 / app.ratio,
          app.gutter + app.scale.width,
          1 / app.ratio,
        );
      }
    }
    context.globalCompositeOperation = "source-over";
  }

  /** Name and colour (of its blocks) of a row. */
  _label(context, sequence, top) {
    const { app } = this,
      middle = top + this.rowHeight / 2;
    const size = Math.min(12, this.rowHeight - 1.5),
      chosen = sequence === app.cursor.sequence;
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
    context.fillText(
      fitted(context, app.model.sequences[sequence].name, app.gutter - 38),
      28,
      middle + 0.5,
    );
  }

  /** What a span says, where there is room for it. */
  _texts(context, sequence, top, columns) {
    const { app } = this,
      { model, scale, theme } = app,
      middle = top + this.rowHeight / 2 + 0.5;
    const end = model.offsets[sequence + 1];
    context.font = `10.5px ${FONT}`;
    let span = Math.max(
      lastAtMost(model.first, columns.first, model.offsets[sequence], end),
      model.offsets[sequence],
    );
    for (; span < end && model.first[span] <= columns.last; span++) {
      const left = Math.max(0, scale.x(scale.left(model.first[span])));
      const room = Math.min(scale.width, scale.x(scale.right(model.last[span]))) - left;
      if (room < 22) continue;
      const code = model.code[span],
        idle = isIdle(code);
      if (idle && room < 90) continue;
      const [from, to] = model.draftsIn(sequence, model.first[span], model.last[span]);
      if (to > from) continue; // they are drawn here
      let text = count(model.b[span]);
      if (code === DECODE) text = plural(model.decoded(sequence, span), "token");
      if (idle) text = app.words.reason(model.a[span]);
      const width = Math.min(context.measureText(text).width, room - 16),
        x = app.gutter + left + 6;
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

  /** The drafts of each step, where a step is some pixels wide. */
  _drafts(context, sequence, top, columns) {
    const { model, scale, gutter, theme } = this.app,
      [from, to] = model.draftsIn(sequence, columns.first, columns.last);
    if (to === from) return;
    context.save();
    context.beginPath();
    context.rect(gutter, 0, scale.width, this.height);
    context.clip();
    for (let i = from; i < to; i++) {
      const left = scale.x(scale.left(model.draftColumn[i])),
        width = scale.x(scale.right(model.draftColumn[i])) - left,
        counts = [model.drafted[i], model.accepted[i]];
      const box = [gutter + left + width / 5, top + this.rowHeight / 10];
      if (width >= 5)
        drawDrafts(context, ...box, 0.6 * width, 0.8 * this.rowHeight, ...counts, theme);
    }
    context.restore();
  }

  /** Where a sequence arrived, and how it ended: a mark beside its bar. */
  _marks(context, sequence, middle) {
    const { app } = this,
      { model, scale, gutter, theme } = app,
      about = model.sequences[sequence];
    const size = Math.min(4, this.rowHeight / 3.2),
      forked = about.parent !== null; // it never arrived
    const arrived =
      scale.byTime && about.arrival !== null
        ? about.arrival
        : scale.left(model.firstColumn(sequence));
    const x = scale.x(arrived);
    context.lineWidth = 1.4;
    context.strokeStyle = context.fillStyle = css(theme.ink);
    if (!forked && scale.byTime && arrived < model.begin[model.firstColumn(sequence)]) {
      // before the step began
      const to = Math.min(scale.x(model.begin[model.firstColumn(sequence)]), scale.width);
      context.fillStyle = css(theme.states[WAITING]);
      if (to > Math.max(x, 0))
        context.fillRect(gutter + Math.max(x, 0), middle - 1, to - Math.max(x, 0), 2);
    }
    if (!forked && x >= -1 && x <= scale.width)
      drawMark(context, "arrival", gutter + x, middle, size, theme);
    const done = scale.x(scale.right(model.lastColumn(sequence)));
    if (about.end && done >= 0 && done + 2 * size <= scale.width + 1)
      drawMark(context, about.end, gutter + done + size + 2, middle, size, theme);
  }
}

/** Drafts as a stack of boxes, the first lowest: filled as far as they were accepted, then hollow. */
function drawDrafts(context, x, y, width, height, drafted, accepted, theme) {
  const each = height / drafted,
    gap = Math.min(1, each / 4);
  for (let place = 0; place < drafted; place++) {
    const top = y + height - (place + 1) * each;
    context.fillStyle = css(theme.ink);
    context.fillRect(x, top, width, each - gap);
    if (place < accepted) continue;
    context.fillStyle = css(theme.back);
    context.fillRect(x + gap, top + gap, width - 2 * gap, Math.max(each - 3 * gap, 0));
  }
}

/** The marks; the legend draws them with this, too. */
function drawMark(context, kind, x, y, size, theme) {
  context.strokeStyle = context.fillStyle = css(
    kind === "error" || kind === "abort" ? theme.alarm : theme.ink,
  );
  context.lineWidth = 1.4;
  context.beginPath();
  if (kind === "arrival") {
    // a pole with a flag, left of what follows
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
  } else {
    // error: a diamond
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
  let from = 0,
    to = text.length;
  while (from < to) {
    const middle = (from + to + 1) >> 1;
    if (context.measureText(`${text.slice(0, middle)}\u2026`).width <= width) from = middle;
    else to = middle - 1;
  }
  return isolated(`${text.slice(0, from)}\u2026`);
}
