"use strict";
/* A lane per rank: what it computed in each step, and how long it communicated or waited.
 *
 * A lane is as high as the slowest rank of the step took, with computing below and communicating
 * above. So the rank that the others wait for has the most below. Where a pixel stands for many
 * steps, their seconds are added up. There are no lanes where there is one rank.
 */

const LANES = { all: 180, most: 22, least: 4, named: 11 }; // CSS pixels, together and of one
const RANK_PARTS = [
  { key: "computing", name: "computes", colour: (t) => t.states[PREFILL] },
  {
    key: "communicating",
    name: "communicates or waits",
    colour: (t) => mix(t.back, rgb(OKABE_ITO[0]), 0.5),
  },
];

class RankLanes {
  constructor(app) {
    this.app = app;
    this.ranks = app.model.ranks;
    this.outputs = [];
    const number = this.ranks.length;
    if (!number) return;
    this.height = Math.min(LANES.most, Math.max(LANES.least, Math.floor(LANES.all / number)));
    for (const id of ["ranks-caption", "ranks-lane"]) document.getElementById(id).hidden = false;
    document.getElementById("ranks-title").textContent = `Ranks (${count(number)})`;
    const names = document.getElementById("ranks-names"),
      each = Math.ceil(LANES.named / this.height); // a name needs so many lanes
    this.ranks.forEach(({ rank }, i) => {
      if (i % each) return;
      const output = element("output"),
        name = element("span", `rank ${rank}`, output);
      name.style.height = `${Math.min(each, number - i) * this.height}px`;
      names.append(name);
      this.outputs.push([i, output]);
    });
    this.swatches = RANK_PARTS.map(({ name }) => {
      const swatch = element("i");
      document.getElementById("ranks-legend").append(element("li", swatch, name));
      return swatch;
    });
  }

  colour(theme) {
    if (!this.ranks.length) return;
    RANK_PARTS.forEach((part, i) => (this.swatches[i].style.background = css(part.colour(theme))));
  }

  values(column) {
    for (const [rank, output] of this.outputs)
      output.textContent = column === null ? "" : this.app.words.rank(rank, column);
  }

  /** The rank whose lane is at this height, in CSS pixels from the top of the lanes. */
  rankAt(y) {
    return Math.min(Math.max(Math.floor(y / this.height), 0), this.ranks.length - 1);
  }

  draw(columns) {
    if (!this.ranks.length) return;
    const { app, height, ranks } = this,
      { context } = app.begin("ranks", 0, height * ranks.length);
    const shares = laneShares(ranks, columns),
      scale = app.scale.width / columns.pixels,
      room = height - 2;
    shares.forEach((parts, rank) => {
      const floor = (rank + 1) * height - 1;
      parts.forEach((share, part) => {
        const below = part ? parts[0] : null; // communicating stands on computing
        context.fillStyle = css(RANK_PARTS[part].colour(app.theme));
        for (let p = 0; p < columns.pixels; ) {
          let end = p + 1;
          while (
            end < columns.pixels &&
            share[end] === share[p] &&
            (!below || below[end] === below[p])
          )
            end++;
          const tall = share[p] * room,
            from = below ? below[p] * room : 0;
          if (tall) context.fillRect(p * scale, floor - from - tall, (end - p) * scale, tall);
          p = end;
        }
      });
      context.fillStyle = css(app.theme.line);
      context.fillRect(0, floor, app.scale.width, 1);
    });
  }
}

/** Of each rank, for each part and pixel: its share of what the slowest rank took there. */
function laneShares(ranks, { first, begin, end, pixels }) {
  const sums = ranks.map(() => RANK_PARTS.map(() => new Float64Array(pixels)));
  for (let i = 0; i < begin.length; i++) {
    const last = Math.min(Math.max(end[i], begin[i] + 1), pixels);
    ranks.forEach((lane, rank) => {
      RANK_PARTS.forEach(({ key }, part) => {
        const value = lane[key][first + i];
        for (let p = begin[i]; p < last; p++) sums[rank][part][p] += value;
      });
    });
  }
  for (let p = 0; p < pixels; p++) {
    const slowest = Math.max(...sums.map(([computing, other]) => computing[p] + other[p]));
    if (slowest) for (const parts of sums) for (const part of parts) part[p] /= slowest;
  }
  return sums;
}
