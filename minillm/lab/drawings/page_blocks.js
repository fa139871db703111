"use strict";
/* The block map: a row per block, or per some blocks, coloured by the sequence that holds it. */

class BlockMap extends Rows {
  constructor(app) {
    super(app, "blocks");
    this.group = 1; // blocks per row
    this.shown = app.model.shownBlocks();
    const { holders } = app.model; // the code of each change while no sequence is in the light
    this._plain = Uint16Array.from(holders, (held) =>
      held.length ? (held.length > 1 ? SHARED : OWNED) + (held[0] % HUES) : USED,
    );
    this._runs = Array.from({ length: 6 }, () => new Int32Array(3072)); // of a row, by rank: code, from, to, ...
    this._numRuns = new Int32Array(6);
  }

  draw(columns) {
    const { app } = this,
      { theme, ratio } = app;
    const { context, width } = this.paint(
      columns,
      (row) => this._codes(row, columns),
      (code, height) => blockTile(theme, code, height, ratio),
      6,
    );
    this._scaleMarks(context);
    if (this.rowHeight >= 8 && this.group === 1) {
      for (let row = this.firstRow; row <= this.lastRow; row++)
        this._texts(context, row, columns, width);
    }
  }

  /** The code of a change: who holds the block, and is it in the light? */
  _code(change) {
    if (change < 0) return 0;
    const chosen = this.app.highlighted;
    if (chosen === null) return this._plain[change];
    const holders = this.app.model.holders[change];
    if (!holders.length) return USED;
    const dim = holders.includes(chosen) ? 0 : DIM,
      owner = dim ? holders[0] : chosen;
    return (holders.length > 1 ? SHARED : OWNED) + (owner % HUES) + dim;
  }

  /** One code per pixel for the blocks of a row; of several the most telling one. The runs of all
   * blocks are filled in order of rank, and held blocks are counted by where runs begin and end, so
   * that the cost is that of the changes, not of blocks times pixels. */
  _codes(row, columns) {
    const { codes, held, shared } = this.raster,
      to = Math.min((row + 1) * this.group, this.shown.length);
    this._numRuns.fill(0);
    held.fill(0);
    shared.fill(0);
    for (let place = to - 1; place >= row * this.group; place--)
      this._blockRuns(this.shown[place], columns); // the first wins
    for (let rank = 1; rank < this._runs.length; rank++) {
      const runs = this._runs[rank],
        length = this._numRuns[rank];
      for (let i = 0; i < length; i += 3) {
        const code = runs[i],
          to = runs[i + 2];
        for (let x = runs[i + 1]; x < to; x++) codes[x] = code; // most are short
      }
    }
    if (this.group > 1) this._quarters(to - row * this.group);
  }

  /** The stretches of pixels in which a block has one code, by rank. */
  _blockRuns(block, { first, last, begin, end, pixels }) {
    const { model } = this.app,
      { held, shared } = this.raster,
      until = model.blockOffsets[block + 1];
    let change = model.changeAt(block, first),
      column = first;
    while (column <= last) {
      const following = change < 0 ? model.blockOffsets[block] : change + 1;
      const stop = following < until ? Math.min(model.changed[following], last + 1) : last + 1;
      const code = this._code(change),
        from = begin[column - first];
      let to = stop <= last ? begin[stop - first] : end[last - first]; // also through a pause
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
    const { app } = this,
      { model, scale, theme } = app,
      block = this.shown[row],
      until = model.blockOffsets[block + 1];
    const middle = this.top(row) + this.rowHeight / 2;
    context.font = `${Math.min(10.5, this.rowHeight + 1)}px ${FONT}`;
    context.textBaseline = "middle";
    let change = Math.max(model.changeAt(block, columns.first), model.blockOffsets[block]);
    for (; change < until && model.changed[change] <= columns.last; change++) {
      const holders = model.holders[change],
        shared = holders.length > 1;
      if (!holders.length) continue;
      const next = change + 1 < until ? model.changed[change + 1] : model.numColumns;
      const from = Math.max(0, scale.x(scale.left(model.changed[change])));
      const room = Math.min(scale.width, scale.x(scale.right(next - 1))) - from;
      if (room < (shared ? 18 : 46) || (!shared && this.rowHeight < 11)) continue;
      const text = shared
        ? `\u00d7${holders.length}`
        : fitted(context, model.sequences[holders[0]].name, room - 8);
      const wide = context.measureText(text).width,
        x = app.gutter + from + 4;
      const dim = this._code(change) & DIM,
        colour = theme.owner(holders[0]);
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
    const { app } = this,
      each = Math.max(1, Math.ceil(13 / this.rowHeight));
    const step = ticks(0, each * this.group, 1, 1).step;
    context.font = `${Math.min(11, Math.max(9, this.rowHeight))}px ${FONT}`;
    context.textBaseline = "middle";
    context.textAlign = "right";
    context.fillStyle = css(app.theme.muted);
    for (let place = 0; place < this.shown.length; place += step) {
      const row = place / this.group,
        y = this.top(row) + Math.min(this.rowHeight, this.rowHeight / this.group) / 2;
      if (y > -8 && y < this.height + 8)
        context.fillText(count(this.shown[place]), app.gutter - 8, Math.max(y, 6));
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
