"use strict";
/* The trace as the drawing needs it: flat arrays to scan, and searches by column.
 *
 * A column is one recorded step. Spans and changes of blocks are hundreds of thousands in a long
 * trace, so they live in typed arrays, where a scan costs nanoseconds per entry.
 */

// What a sequence does in a column, by rising importance: where several share one pixel, the
// highest code is drawn, so that a preemption of one step is visible in any zoom.
const STATES = [
  null,
  { key: "w", name: "waiting" },
  { key: "d", name: "decode" },
  { key: "p", name: "prefill" },
  { key: "r", name: "recomputed" },
  { key: "s", name: "stalled" },
  { key: "o", name: "swapped out" },
  { key: "x", name: "preempted" },
];
const [WAITING, DECODE, PREFILL, RECOMPUTED, STALLED, SWAPPED, PREEMPTED] = [1, 2, 3, 4, 5, 6, 7];
const isIdle = (code) => code === WAITING || code >= STALLED; // holds a reason, computes nothing
const isPreempted = (code) => code >= SWAPPED;

/** Index of the last entry of sorted `values[from..to)` that is at most `wanted`; from - 1 if none. */
function lastAtMost(values, wanted, from = 0, to = values.length) {
  while (from < to) {
    const middle = (from + to) >> 1;
    if (values[middle] <= wanted) from = middle + 1;
    else to = middle;
  }
  return from - 1;
}

class Model {
  constructor(data) {
    this.meta = data.meta;
    this.steps = data.steps;
    this.reasons = data.reasons;
    this.sequences = data.sequences;
    this.ranks = data.ranks; // seconds per column, computing and communicating; none of one rank
    this.numColumns = data.steps.step.length;
    this.numBlocks = data.blocks.length;
    this._clock();
    this._spans();
    this._drafts();
    this._blocks(data.blocks);
    this._order = new Map();
  }

  /** Begin and end of each column in seconds. A short pause belongs to the step before it; a longer
   * one, when there was nothing to do, stays empty. */
  _clock() {
    const { start, plan, run, deliver } = this.steps,
      n = this.numColumns;
    this.begin = Float64Array.from(start);
    this.end = new Float64Array(n);
    for (let c = 0; c < n; c++) {
      const took = plan[c] + run[c] + deliver[c],
        next = c + 1 < n ? start[c + 1] : Infinity;
      this.end[c] = next - start[c] <= 2 * took ? next : start[c] + took;
    }
    this.duration = n ? this.end[n - 1] : 1;
  }

  _spans() {
    const codes = Object.fromEntries(STATES.map((state, code) => [state && state.key, code]));
    const total = this.sequences.reduce((sum, sequence) => sum + sequence.spans.length, 0);
    this.offsets = new Int32Array(this.sequences.length + 1);
    this.code = new Uint8Array(total);
    for (const name of ["first", "last", "a", "b"]) this[name] = new Int32Array(total);
    // For the Gantt: the same without regard to reasons, which change far more often than states.
    const bars = { code: [], first: [], last: [] };
    this.barOffsets = new Int32Array(this.sequences.length + 1);
    this.preemptedAt = new Map(); // column -> sequences that lost their place there
    let at = 0;
    this.sequences.forEach((sequence, index) => {
      this.offsets[index] = at;
      this.barOffsets[index] = bars.code.length;
      let before = 0;
      for (const [kind, first, last, a, b] of sequence.spans) {
        const code = codes[kind];
        this.code[at] = code;
        this.first[at] = first;
        this.last[at] = last;
        this.a[at] = a;
        this.b[at++] = b || 0;
        if (isPreempted(code) && !isPreempted(before)) {
          if (!this.preemptedAt.has(first)) this.preemptedAt.set(first, []);
          this.preemptedAt.get(first).push(index);
        }
        if (code === before && isIdle(code)) bars.last[bars.last.length - 1] = last;
        else (bars.code.push(code), bars.first.push(first), bars.last.push(last));
        before = code;
      }
      sequence.spans = null; // the arrays have it now; half the memory of a long trace
    });
    this.offsets[this.sequences.length] = at;
    this.barOffsets[this.sequences.length] = bars.code.length;
    this.bars = {
      code: Uint8Array.from(bars.code),
      first: Int32Array.from(bars.first),
      last: Int32Array.from(bars.last),
    };
  }

  /** Of each step that verified drafts of a sequence: their number, and how many were accepted. */
  _drafts() {
    const total = this.sequences.reduce((sum, sequence) => sum + sequence.drafts.length, 0);
    this.draftOffsets = new Int32Array(this.sequences.length + 1);
    for (const name of ["draftColumn", "drafted", "accepted"]) this[name] = new Int32Array(total);
    let at = 0;
    this.sequences.forEach((sequence, index) => {
      this.draftOffsets[index] = at;
      for (const [column, drafted, accepted] of sequence.drafts) {
        this.draftColumn[at] = column;
        this.drafted[at] = drafted;
        this.accepted[at++] = accepted;
      }
      sequence.drafts = null;
    });
    this.draftOffsets[this.sequences.length] = at;
  }

  get hasDrafts() {
    return this.draftColumn.length > 0;
  }

  _blocks(blocks) {
    const total = blocks.reduce((sum, changes) => sum + changes.length, 0);
    this.blockOffsets = new Int32Array(blocks.length + 1);
    this.changed = new Int32Array(total); // column at whose end it changed
    this.holders = new Array(total);
    let at = 0;
    blocks.forEach((changes, block) => {
      this.blockOffsets[block] = at;
      for (const [column, holders] of changes) {
        this.changed[at] = column;
        this.holders[at++] = holders;
      }
    });
    this.blockOffsets[blocks.length] = at;
  }

  // ---- sequences ---------------------------------------------------------------------------

  /** Index of the span of a sequence that covers a column, -1 if it was not there. */
  spanAt(sequence, column) {
    const from = this.offsets[sequence],
      to = this.offsets[sequence + 1];
    const span = lastAtMost(this.first, column, from, to);
    return span >= from && this.last[span] >= column ? span : -1;
  }

  /** Places of the drafts of a sequence in columns `first` to `last`: [from, to). */
  draftsIn(sequence, first, last) {
    const from = this.draftOffsets[sequence],
      to = this.draftOffsets[sequence + 1];
    return [first - 1, last].map((column) => lastAtMost(this.draftColumn, column, from, to) + 1);
  }

  /** How many tokens were drafted for a sequence in these columns, and how many accepted. */
  draftCounts(sequence, first, last) {
    const counts = [0, 0],
      [from, to] = this.draftsIn(sequence, first, last);
    for (let i = from; i < to; i++) {
      counts[0] += this.drafted[i];
      counts[1] += this.accepted[i];
    }
    return counts;
  }

  /** Tokens of a span of decode steps: one in each, and accepted drafts. */
  decoded(sequence, span) {
    const first = this.first[span],
      last = this.last[span];
    return last - first + 1 + this.draftCounts(sequence, first, last)[1];
  }

  firstColumn(sequence) {
    const from = this.offsets[sequence];
    return from < this.offsets[sequence + 1] ? this.first[from] : this.sequences[sequence].added;
  }

  lastColumn(sequence) {
    const to = this.offsets[sequence + 1];
    return to > this.offsets[sequence] ? this.last[to - 1] : this.sequences[sequence].added;
  }

  /** What the rows are: requests, unless some of them have several completions. */
  rowName() {
    return this.sequences.some((one) => one.parent !== null) ? "Sequences" : "Requests";
  }

  /** Columns where a sequence lost its blocks, and the reasons. */
  losses(sequence) {
    const found = [];
    for (let s = this.offsets[sequence]; s < this.offsets[sequence + 1]; s++) {
      if (this.preemptedAt.get(this.first[s])?.includes(sequence))
        found.push([this.first[s], this.a[s]]);
    }
    return found;
  }

  /** How many tokens of a sequence were computed again. */
  recomputed(sequence) {
    let number = 0,
      furthest = Infinity; // unknown, where the trace begins later
    for (let s = this.offsets[sequence]; s < this.offsets[sequence + 1]; s++) {
      const from = this.a[s],
        code = this.code[s];
      if (isIdle(code)) continue;
      const to = from + (code === DECODE ? this.decoded(sequence, s) : this.b[s]);
      if (code === RECOMPUTED) number += Math.min(to, furthest) - from;
      furthest = furthest === Infinity ? to : Math.max(furthest, to);
    }
    return number;
  }

  /** Columns and seconds that a sequence spent in each state: {code: {columns, seconds}}. */
  stays(sequence) {
    const found = {};
    for (let s = this.offsets[sequence]; s < this.offsets[sequence + 1]; s++) {
      const stay = (found[this.code[s]] ??= { columns: 0, seconds: 0 });
      stay.columns += this.last[s] - this.first[s] + 1;
      stay.seconds += this.end[this.last[s]] - this.begin[this.first[s]];
    }
    return found;
  }

  /** Columns where a sequence was preempted, or is refused for another reason than before. */
  events(sequence) {
    const columns = [];
    for (let s = this.offsets[sequence]; s < this.offsets[sequence + 1]; s++) {
      const same =
        s > this.offsets[sequence] &&
        this.code[s - 1] === this.code[s] &&
        this.a[s - 1] === this.a[s];
      if (isIdle(this.code[s]) && !same) columns.push(this.first[s]);
    }
    return columns;
  }

  /** Sequence indices in the order of the rows. */
  order(by) {
    if (this._order.has(by)) return this._order.get(by);
    const count = this.sequences.length,
      keys = new Float64Array(count);
    for (let i = 0; i < count; i++) {
      if (by === "arrival") keys[i] = this.sequences[i].parent ?? i; // completions stay together
      if (by === "end") keys[i] = this.sequences[i].ended ?? Infinity;
      if (by === "preemptions") keys[i] = -this.sequences[i].preemptions;
      if (by === "waiting") {
        const stays = this.stays(i);
        for (const code in stays) if (isIdle(+code)) keys[i] -= stays[code].seconds;
      }
    }
    const order = Array.from(keys.keys()).sort((a, b) => keys[a] - keys[b] || a - b);
    this._order.set(by, order);
    return order;
  }

  // ---- steps -------------------------------------------------------------------------------

  /** Who was next in line at a column and why it stayed there: [sequence, reason], or null. */
  blockedAt(column) {
    const runs = this.steps.blocked;
    let from = 0,
      to = runs.length;
    while (from < to) {
      const middle = (from + to) >> 1;
      if (runs[middle][0] <= column) from = middle + 1;
      else to = middle;
    }
    const run = runs[from - 1];
    return run && run[1] >= column ? [run[2], run[3]] : null;
  }

  /** All sequences that were there at a column, by state: {code: [[sequence, span], ...]}. */
  presentAt(column) {
    const present = {};
    for (let sequence = 0; sequence < this.sequences.length; sequence++) {
      const span = this.spanAt(sequence, column);
      if (span >= 0) (present[this.code[span]] ??= []).push([sequence, span]);
    }
    return present;
  }

  columnAtTime(seconds) {
    return Math.max(0, lastAtMost(this.begin, seconds));
  }

  // ---- blocks ------------------------------------------------------------------------------

  /** The blocks that are worth a row: all, or, where most were never used, only those that were. */
  shownBlocks() {
    const all = Array.from({ length: this.numBlocks }, (_, block) => block);
    const used = all.filter((block) => this.blockOffsets[block + 1] > this.blockOffsets[block]);
    return used.length && 2 * used.length < all.length ? used : all;
  }

  /** Index of the change in force for a block as a column's step left it, -1 before the first. */
  changeAt(block, column) {
    const from = this.blockOffsets[block];
    const change = lastAtMost(this.changed, column, from, this.blockOffsets[block + 1]);
    return change >= from ? change : -1;
  }
}
