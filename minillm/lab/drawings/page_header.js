"use strict";
/* What stands around the drawing: the engine, the totals, the legends. */

/** What engine it was, and the totals. */
function showHeader(model) {
  const { meta, steps, sequences } = model,
    sum = (values) => values.reduce((a, b) => a + b, 0);
  const engine = [
    meta.model,
    meta.dtype,
    meta.device,
    meta.policy && `policy ${meta.policy}`,
    meta.preemption && `preemption by ${meta.preemption}`,
    meta.prefix_cache && `prefix cache ${meta.prefix_cache}`,
    meta.num_blocks &&
      `${count(meta.num_blocks)} blocks${meta.block_size ? ` of ${plural(meta.block_size, "token")}` : ""}`,
    meta.started &&
      new Date(meta.started * 1000).toISOString().replace("T", " ").slice(0, 16) + " UTC",
    meta.num_dropped && `the ${count(meta.num_dropped)} steps before were not kept`,
  ];
  document.getElementById("engine").textContent = engine
    .filter(Boolean)
    .map(plain)
    .join(" \u00b7 ");
  const requests = sequences.filter((s) => s.parent === null).length,
    again = sum(steps.recomputed);
  const cached = sum(sequences.filter((s) => s.parent === null).map((s) => s.cached));
  const totals = [
    ["steps", count(model.numColumns)],
    [
      requests < sequences.length ? `requests, ${count(sequences.length)} sequences` : "requests",
      count(requests),
    ],
    [
      again ? `tokens computed, ${count(again)} again` : "tokens computed",
      count(sum(steps.prefill) + sum(steps.decode) + sum(steps.drafted)),
    ],
    ...(model.hasDrafts
      ? [["drafts accepted", `${count(sum(steps.accepted))} of ${count(sum(steps.drafted))}`]]
      : []),
    ["prompt tokens cached", count(cached)],
    ["preemptions", count(sum(sequences.map((s) => s.preemptions)))],
    ["duration", seconds(model.duration)],
  ];
  for (const [label, value] of totals) {
    document
      .getElementById("totals")
      .append(element("div", element("dt", label), element("dd", value)));
  }
}

/** The legends are drawn with the very tiles and marks of the panels. */
function showLegends(theme, model) {
  const ratio = window.devicePixelRatio || 1;
  const swatch = (paint) => {
    const canvas = element("canvas"),
      width = 22,
      height = 14;
    Object.assign(canvas, {
      width: Math.round(width * ratio),
      height: Math.round(height * ratio),
    });
    canvas.style.cssText = `width: ${width}px; height: ${height}px`;
    paint(canvas.getContext("2d"), canvas.width, canvas.height);
    canvas.setAttribute("aria-hidden", "true");
    return canvas;
  };
  const tiled = (tileOf, codes) =>
    swatch((context, width, height) => {
      const raster = new Raster();
      raster.resize(width, height);
      raster.codes.fill(codes);
      raster.row(0, height, (code) => tileOf(theme, code, height, ratio));
      context.putImageData(raster.image, 0, 0);
    });
  const marked = (kind) =>
    swatch((context) => {
      context.scale(ratio, ratio);
      drawMark(context, kind, kind === "arrival" ? 14 : 11, 7, 4, theme);
    });
  const draft = (accepted) =>
    swatch((context, width, height) =>
      drawDrafts(context, 0.2 * width, 0.25 * height, 0.6 * width, height / 2, 1, accepted, theme),
    );
  const entry = (picture, text) => element("li", picture, text);
  const order = [PREFILL, DECODE, WAITING, PREEMPTED, SWAPPED, RECOMPUTED, STALLED];
  document
    .getElementById("gantt-legend")
    .replaceChildren(
      ...order.map((code) => entry(tiled(stateTile, code), STATES[code].name)),
      ...(model.hasDrafts
        ? [entry(draft(1), "accepted draft"), entry(draft(0), "rejected draft")]
        : []),
      ...["arrival", "stop", "length", "abort", "error"].map((kind) => entry(marked(kind), kind)),
    );
  document.getElementById("blocks-legend").replaceChildren(
    entry(tiled(blockTile, OWNED + 1), "held (colour: request)"),
    entry(tiled(blockTile, SHARED + 1), "shared (number: holders)"),
    entry(tiled(blockTile, USED), "free after use"),
    entry(
      swatch((context, width, height) => {
        context.strokeStyle = css(theme.line);
        context.lineWidth = 2;
        context.strokeRect(0, 0, width, height);
      }),
      "free, never used",
    ),
  );
}
