"use strict";
/* The horizontal axis that all panels share: columns (steps) or seconds, and which part is shown. */

class Scale {
  constructor(model) {
    this.model = model;
    this.byTime = false;
    this.from = 0; // in units: columns or seconds
    this.to = this.extent;
    this.width = 1; // CSS pixels
  }

  get extent() {
    return Math.max(this.byTime ? this.model.duration : this.model.numColumns, 1e-9);
  }

  left(column) {
    return this.byTime ? this.model.begin[column] : column;
  }

  right(column) {
    return this.byTime ? this.model.end[column] : column + 1;
  }

  x(unit) {
    return ((unit - this.from) / (this.to - this.from)) * this.width;
  }

  unit(x) {
    return this.from + (x / this.width) * (this.to - this.from);
  }

  /** The column at a unit, limited to those there are. */
  columnAt(unit) {
    const column = this.byTime ? this.model.columnAtTime(unit) : Math.floor(unit);
    return Math.min(Math.max(column, 0), this.model.numColumns - 1);
  }

  /** Show a range, moved and limited so that it lies in the trace. */
  show(from, to) {
    const least = Math.min(
      this.extent,
      this.byTime ? this.extent / Math.max(this.model.numColumns, 1) : 4,
    );
    const span = Math.min(Math.max(to - from, least), this.extent);
    const centre = (from + to) / 2;
    this.from = Math.min(Math.max(centre - span / 2, 0), this.extent - span);
    this.to = this.from + span;
  }

  /** Change between columns and seconds; the same steps stay in view. */
  setByTime(byTime) {
    if (byTime === this.byTime) return;
    const convert = (unit) => {
      const column = this.columnAt(unit);
      const share = (unit - this.left(column)) / (this.right(column) - this.left(column) || 1);
      return [column, Math.min(Math.max(share, 0), 1)];
    };
    const ends = [convert(this.from), convert(this.to)];
    const all = this.from <= 0 && this.to >= this.extent;
    this.byTime = byTime;
    const [from, to] = ends.map(
      ([c, share]) => this.left(c) + share * (this.right(c) - this.left(c)),
    );
    if (all) this.show(0, this.extent);
    else this.show(from, to);
  }

  /** The columns in view and their edges in device pixels, which every panel scans. */
  columns(ratio) {
    const first = this.columnAt(this.from);
    let last = this.columnAt(this.to);
    if (last > first && this.left(last) >= this.to) last--;
    const size = last - first + 1,
      begin = new Int32Array(size),
      end = new Int32Array(size);
    const pixels = Math.round(this.width * ratio),
      factor = pixels / (this.to - this.from);
    const place = (unit) => Math.round(Math.min(Math.max((unit - this.from) * factor, 0), pixels));
    for (let i = 0; i < size; i++) {
      begin[i] = place(this.left(first + i));
      end[i] = place(this.right(first + i));
    }
    return { first, last, begin, end, pixels };
  }
}

/** About `target` round numbers between two others: 1, 2 or 5 times a power of ten apart. */
function ticks(from, to, target, least = 0) {
  const rough = (to - from) / Math.max(target, 1),
    power = 10 ** Math.floor(Math.log10(rough));
  const step = Math.max([1, 2, 5, 10].find((factor) => factor * power >= rough) * power, least);
  const found = [];
  for (let value = Math.ceil(from / step) * step; value <= to + step * 1e-6; value += step)
    found.push(value);
  return { step, values: found };
}
