"use strict";
/* What the trace says, in words: for the details panel, the hover text and screen readers. */

// A request's name is its user's text: no line breaks, and no effect on the text around it.
const plain = (text) => text.replace(/[\u0000-\u001f\u007f-\u009f\u2028\u2029]/g, "\u00b7");
const isolated = (text) => `\u2068${plain(text)}\u2069`;

function moment(value) {
  // a point on the clock, not a duration
  if (value < 0) return `${seconds(-value)} before the first step`; // a request waits before it runs
  return value < 1 ? seconds(value) : `${value.toFixed(3)} s`;
}

// The reason of all who are not next in line; who that is, is said once per step.
const BEHIND = "behind the head of the queue";

// The help: keys, the pointer, and words.
const KEYS = [
  ["\u2190 \u2192", "one step back or on; with Shift ten"],
  ["\u2191 \u2193", "the request above or below; with Shift ten"],
  ["+ \u2212 0", "zoom in, zoom out, show all"],
  ["Home End", "first and last step"],
  [
    "n p",
    "next and previous preemption or refusal of the chosen request (of any, if none is chosen)",
  ],
  ["/", "find a request by name; Enter goes to the next"],
  ["z", "zoom to the chosen request"],
  ["t", "steps or wall-clock time"],
  ["s", "another order of the rows"],
  ["c", "show or hide the curves"],
  ["[ ]", "lower or higher rows"],
  ["Esc", "release what is pinned"],
  ["?", "this help"],
];
const POINTER = [
  ["hover, click", "shows what is there; pins it"],
  ["drag", "moves; with Shift it zooms to what was dragged over"],
  [
    "wheel",
    "zooms over the curves, scrolls the rows; with Ctrl it zooms everywhere, with Shift it moves",
  ],
  ["double click", "zooms to the request"],
  ["overview", "drag the window or its edges, or a new window beside it"],
];
const WORDS = [
  [
    "plan, run, deliver",
    "the parts of a step: who is computed is decided; the model runs and samples are drawn; texts and outputs are made",
  ],
  [
    "needs, has",
    "blocks it would begin with, and free blocks less those kept for who runs; 0 in a step that ran short. The numbers of the last look stand while no block is freed",
  ],
  ["recomputed", "tokens that were computed before, but their blocks were lost by a preemption"],
  [
    "stalled",
    "it runs, but this step had no tokens or blocks for it, or was planned before its last tokens were known",
  ],
  [
    "ranks",
    "a lane is as high as the slowest rank of the step took: below, a rank computes; above, it sends to the others or waits for them",
  ],
  [
    "drafts",
    "guessed tokens that a step verifies together: accepted ones are tokens of the request, after them one more is sampled",
  ],
];

class Words {
  constructor(model) {
    this.model = model;
  }

  name(sequence) {
    return isolated(this.model.sequences[sequence].name);
  }

  /** A reason; in a column, for those behind another, also who that is and what it lacks. */
  reason(index, column = null) {
    const text = this.model.reasons[index] ?? "no reason recorded";
    const blocked = text === BEHIND && column !== null ? this.model.blockedAt(column) : null;
    return blocked
      ? `behind ${this.name(blocked[0])} (${this.reason(blocked[1])})`
      : isolated(text);
  }

  positions(start, number) {
    return number === 1
      ? `position ${count(start)}`
      : `positions ${count(start)}\u2013${count(start + number - 1)}`;
  }

  /** What a sequence did in a column. */
  state(sequence, column) {
    const model = this.model,
      span = model.spanAt(sequence, column);
    if (span < 0) return this.absence(sequence, column);
    const a = model.a[span],
      b = model.b[span];
    switch (model.code[span]) {
      case PREFILL:
        return `prefill of ${plural(b, "token")}, ${this.positions(a, b)}`;
      case RECOMPUTED:
        return `recomputed ${plural(b, "token")} after a preemption, ${this.positions(a, b)}`;
      case DECODE: {
        const [drafted, accepted] = model.draftCounts(sequence, column, column);
        const done = this.positions(a + column - model.first[span], 1 + accepted);
        return `decode of ${plural(1 + accepted, "token")}, ${done}${this.drafts(drafted, accepted)}`;
      }
      case WAITING:
        return `waiting: ${this.reason(a, column)}`;
      case STALLED:
        return `running, but stalled: ${this.reason(a, column)}`;
      case SWAPPED:
        return `swapped out to host memory: ${this.reason(a, column)}`;
      default:
        return `preempted, its blocks are gone: ${this.reason(a, column)}`;
    }
  }

  drafts(drafted, accepted) {
    return drafted ? `, ${count(accepted)} of ${plural(drafted, "draft")} accepted` : "";
  }

  /** What a rank did in a column. */
  rank(rank, column) {
    const { computing, communicating } = this.model.ranks[rank];
    return `${seconds(computing[column])} + ${seconds(communicating[column])}`;
  }

  absence(sequence, column) {
    const { end } = this.model.sequences[sequence];
    if (column < this.model.firstColumn(sequence)) return "not there yet";
    return end ? `finished (${this.ending(end)})` : "no longer recorded";
  }

  ending(end) {
    return (
      {
        stop: "stop: it came to its end",
        length: "length: it reached its limit",
        abort: "abort: its user gave it up",
        error: "error: it failed",
      }[end] ?? "not finished here"
    );
  }

  block(block, column) {
    const change = this.model.changeAt(block, column);
    const holders = change < 0 ? [] : this.model.holders[change];
    if (holders.length > 1) return `shared by ${count(holders.length)} sequences`;
    if (holders.length) return `held by ${this.name(holders[0])}`;
    return change < 0 ? "free, never used" : "free after use";
  }

  /** The record of a column in one breath, for the live region. */
  spoken(column, sequence, block) {
    const { step, running, waiting, free } = this.model.steps;
    const parts = [`Step ${step[column]}.`];
    if (sequence !== null) parts.push(`${this.name(sequence)}: ${this.state(sequence, column)}.`);
    if (block !== null) parts.push(`Block ${block}: ${this.block(block, column)}.`);
    parts.push(
      `${running[column]} running, ${waiting[column]} waiting, ${plural(free[column], "block")} free.`,
    );
    for (const victim of this.model.preemptedAt.get(column) ?? []) {
      if (victim !== sequence) parts.push(`${this.name(victim)}: ${this.state(victim, column)}.`);
    }
    return parts.join(" ");
  }
}
