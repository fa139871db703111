"use strict";
/* The overview, the ruler and the curves over the steps. Where a pixel stands for many steps, a
 * line shows the highest of them over a band down to the lowest, and a stack shows the highest. */

class Curves {
  constructor(app) {
    this.app = app;
    const { steps } = app.model;
    const fresh = Float64Array.from(steps.prefill, (value, c) =>
      Math.max(0, value - steps.recomputed[c]),
    );
    this.panels = [
      {
        id: "queue",
        title: "Sequences",
        format: count,
        parts: [
          { name: "waiting", values: steps.waiting, colour: (t) => t.alarm, dash: [4, 2] },
          { name: "running", values: steps.running, colour: (t) => t.states[DECODE] },
        ],
      },
      {
        id: "budget",
        title: "Tokens per step",
        format: count,
        stack: true,
        limit: app.model.meta.max_num_batched_tokens,
        parts: [
          { name: "decode", values: steps.decode, colour: (t) => t.states[DECODE] },
          { name: "prefill", values: fresh, colour: (t) => t.states[PREFILL] },
          { name: "recomputed", values: steps.recomputed, colour: (t) => t.states[RECOMPUTED] },
          ...(app.model.hasDrafts
            ? [
                {
                  name: "drafted",
                  values: steps.drafted,
                  colour: (t) => rgb(OKABE_ITO[t.dark ? 4 : 1]),
                },
              ]
            : []),
        ],
      },
      {
        id: "free",
        title: "Free blocks",
        format: count,
        limit: app.model.meta.num_blocks,
        fill: true,
        parts: [{ name: "free", values: steps.free, colour: (t) => t.accent }],
      },
      {
        id: "parts",
        title: "Time per step",
        format: seconds,
        stack: true,
        parts: [
          { name: "plan", values: steps.plan, colour: (t) => rgb(OKABE_ITO[0]) },
          {
            name: "run",
            values: steps.run,
            colour: (t) => rgb(t.dark ? OKABE_ITO[1] : OKABE_ITO[4]),
          },
          { name: "deliver", values: steps.deliver, colour: (t) => rgb(OKABE_ITO[6]) },
        ],
      },
    ];
    for (const panel of this.panels) this._gutter(panel);
    this.lanes = new RankLanes(app);
  }

  /** Title, legend and the values under the cursor, left of a curve. */
  _gutter(panel) {
    const gutter = document.getElementById(`${panel.id}-title`);
    gutter.append(element("b", panel.title));
    for (const part of panel.parts) {
      const swatch = element("i"),
        output = element("output");
      gutter.append(element("span", swatch, part.name, output));
      Object.assign(part, { swatch, output });
    }
  }

  colour(theme) {
    this.lanes.colour(theme);
    for (const panel of this.panels) {
      for (const part of panel.parts) part.swatch.style.background = css(part.colour(theme));
    }
  }

  values(column) {
    this.lanes.values(column);
    for (const panel of this.panels) {
      for (const part of panel.parts) {
        part.output.textContent = column === null ? "" : panel.format(part.values[column]);
      }
    }
  }

  draw(columns) {
    for (const panel of this.panels) this._panel(panel, columns);
    this.lanes.draw(columns);
  }

  _panel(panel, columns) {
    const { app } = this,
      { theme } = app,
      { context, width, height } = app.begin(panel.id, 0);
    const { low, high, used, top } = this._reduce(panel, columns);
    // A limit is shown unless it is so far above that the curve would be flat.
    const highest =
      panel.limit && panel.limit < 3 * top
        ? Math.max(top, panel.limit)
        : panel.fill
          ? panel.limit
          : top;
    const ceiling = highest > 0 ? highest * 1.14 : 1,
      y = (value) => height - 1 - (value / ceiling) * (height - 4);
    const { values } = ticks(0, highest || 1, 2, panel.format === count ? 1 : 0),
      inside = panel.limit <= ceiling ? y(panel.limit) : -Infinity, // its line would cross a number
      lines = values.filter((value) => value && Math.abs(y(value) - inside) > 8);
    context.fillStyle = css(theme.line);
    for (const value of lines) context.fillRect(0, Math.round(y(value)), width, 1);
    const scale = width / columns.pixels;
    const area = (lower, upper) => {
      // a filled shape between two step curves
      context.beginPath();
      for (let p = 0; p < columns.pixels; p++) {
        if (!used[p]) continue;
        let end = p + 1;
        while (
          end < columns.pixels &&
          used[end] &&
          lower[end] === lower[p] &&
          upper[end] === upper[p]
        )
          end++;
        if (upper[p] > lower[p])
          context.rect(
            p * scale,
            y(upper[p]),
            (end - p) * scale,
            Math.max(y(lower[p]) - y(upper[p]), 0.7),
          );
        p = end - 1;
      }
      context.fill();
    };
    panel.parts.forEach((part, index) => {
      context.fillStyle = css(part.colour(theme));
      if (panel.stack) return area(low[index], high[index]);
      if (panel.fill) {
        context.globalAlpha = 0.18;
        area(new Float64Array(columns.pixels), low[index]);
      }
      context.globalAlpha = 0.35;
      area(low[index], high[index]);
      context.globalAlpha = 1;
      this._line(context, high[index], used, scale, y, part, theme);
    });
    if (panel.limit) this._limit(context, width, y, panel, ceiling);
    for (const value of lines) {
      const text = panel.format(value);
      context.font = `10px ${FONT}`;
      this._label(
        context,
        text,
        width - 4 - context.measureText(text).width,
        Math.max(Math.round(y(value)), 7),
        theme.muted,
      );
    }
  }

  /** Lowest and highest value of each part in each pixel; of a stack, where it is highest. */
  _reduce(panel, columns) {
    const { first, begin, end, pixels } = columns,
      parts = panel.parts.length;
    const low = panel.parts.map(() => new Float64Array(pixels));
    const high = panel.parts.map(() => new Float64Array(pixels));
    const used = new Uint8Array(pixels);
    let top = 0;
    for (let i = 0; i < begin.length; i++) {
      const column = first + i;
      let total = 0;
      for (let part = 0; part < parts; part++) total += panel.parts[part].values[column];
      const last = Math.min(Math.max(end[i], begin[i] + 1), pixels);
      for (let p = begin[i]; p < last; p++) {
        if (panel.stack) {
          if (used[p] && total <= high[parts - 1][p]) continue;
          for (let part = 0, sum = 0; part < parts; part++) {
            low[part][p] = sum;
            high[part][p] = sum += panel.parts[part].values[column];
          }
        } else {
          for (let part = 0; part < parts; part++) {
            const value = panel.parts[part].values[column];
            low[part][p] = used[p] ? Math.min(low[part][p], value) : value;
            high[part][p] = used[p] ? Math.max(high[part][p], value) : value;
          }
        }
        used[p] = 1;
      }
      if (panel.stack) top = Math.max(top, total);
      else for (const part of panel.parts) top = Math.max(top, part.values[column]);
    }
    return { low, high, used, top };
  }

  _line(context, values, used, scale, y, part, theme) {
    context.strokeStyle = css(part.colour(theme));
    context.lineWidth = 1.4;
    context.setLineDash(part.dash ?? []);
    context.beginPath();
    for (let p = 0, open = false; p < values.length; p++) {
      if (!used[p]) {
        open = false;
        continue;
      }
      if (!open) context.moveTo(p * scale, y(values[p]));
      else if (values[p] !== values[p - 1]) context.lineTo(p * scale, y(values[p]));
      if (p + 1 === values.length || !used[p + 1] || values[p + 1] !== values[p])
        context.lineTo((p + 1) * scale, y(values[p]));
      open = true;
    }
    context.stroke();
    context.setLineDash([]);
  }

  /** The dashed line of a limit, or, where that is far above, only its number. */
  _limit(context, width, y, panel, ceiling) {
    const { theme } = this.app,
      inside = panel.limit <= ceiling;
    if (inside) {
      context.strokeStyle = css(theme.ink);
      context.setLineDash([5, 4]);
      context.lineWidth = 1;
      context.beginPath();
      context.moveTo(0, Math.round(y(panel.limit)) + 0.5);
      context.lineTo(width, Math.round(y(panel.limit)) + 0.5);
      context.stroke();
      context.setLineDash([]);
    }
    const at = inside ? Math.max(y(panel.limit) - 7, 7) : 7;
    this._label(
      context,
      `${panel.id === "free" ? "of" : "limit"} ${count(panel.limit)}${inside ? "" : " (above)"}`,
      5,
      at,
      theme.ink,
    );
  }

  /** A small text on the colour of the background. */
  _label(context, text, x, y, colour) {
    context.font = `10px ${FONT}`;
    context.textBaseline = "middle";
    const wide = context.measureText(text).width;
    context.fillStyle = css(this.app.theme.back);
    context.globalAlpha = 0.8;
    context.fillRect(x - 2, y - 6, wide + 4, 12);
    context.globalAlpha = 1;
    context.fillStyle = css(colour);
    context.fillText(text, x, y + 0.5);
  }

  // ---- overview and ruler ------------------------------------------------------------------

  /** The whole trace in small: who runs, who waits, a tick for each preemption, and the window. */
  overview() {
    const { app } = this,
      { model, theme, scale } = app,
      { context, width, height } = app.begin("overview", 0);
    const full = Object.assign(new Scale(model), { byTime: scale.byTime, width });
    full.show(0, full.extent);
    const [waiting, running] = this.panels[0].parts;
    const panel = { parts: [waiting, running] },
      columns = full.columns(1);
    const { high, used, top } = this._reduce(panel, columns);
    panel.parts.forEach((part, index) => {
      context.fillStyle = css(mix(theme.back, part.colour(theme), index ? 0.85 : 0.5));
      for (let p = 0; p < columns.pixels; p++) {
        const tall = used[p] && top ? (high[index][p] / top) * (height - 8) : 0;
        if (tall) context.fillRect(p, height - tall, 1, tall);
      }
    });
    context.fillStyle = css(theme.ink);
    for (const column of model.preemptedAt.keys())
      context.fillRect(Math.round(full.x(full.left(column))), 0, 1, 5);
    const from = full.x(scale.from),
      to = Math.max(full.x(scale.to), from + 3);
    context.fillStyle = theme.dark ? "rgba(0, 0, 0, .55)" : "rgba(255, 255, 255, .72)";
    context.fillRect(0, 0, from, height);
    context.fillRect(to, 0, width - to, height);
    context.strokeStyle = css(theme.accent);
    context.lineWidth = 2;
    context.strokeRect(from + 1, 1, Math.max(to - from - 2, 1), height - 2);
    context.fillStyle = css(theme.accent);
    for (const edge of [from, to - 4]) context.fillRect(edge, height / 2 - 7, 4, 14);
    this.overviewScale = full;
  }

  ruler() {
    const { app } = this,
      { model, theme, scale } = app,
      { context, width, height } = app.begin("ruler", 0);
    context.font = `11px ${FONT}`;
    context.textBaseline = "middle";
    // Steps are numbered from where the recording begins, so round numbers are not round columns.
    const shift = scale.byTime ? 0 : (model.steps.step[0] ?? 0);
    const { step, values } = ticks(
      scale.from + shift,
      scale.to + shift,
      width / 90,
      scale.byTime ? 0 : 1,
    );
    const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    const small =
      step < 0.9995e-3 || scale.to < 1 ? [1e3, "ms", Math.max(0, digits - 3)] : [1, "s", digits];
    for (const value of values) {
      const x = Math.round(scale.x(value - shift)) + 0.5;
      const text = scale.byTime
        ? `${(value * small[0]).toFixed(small[2])} ${small[1]}`
        : count(Math.round(value));
      context.fillStyle = css(theme.muted);
      context.fillRect(x, height - 5, 1, 5);
      context.fillStyle = css(theme.ink);
      if (x + 4 + context.measureText(text).width <= width)
        context.fillText(text, x + 4, height / 2 + 1);
    }
  }
}
