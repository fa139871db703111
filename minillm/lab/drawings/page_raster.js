"use strict";
/* Colours and patterns, and how rows of them become pixels.
 *
 * Each row (of a sequence, or of blocks) is first reduced to one code per pixel column, then
 * painted from a tile: 16 pixels of pattern, as high as the row. So a frame costs as much as it has
 * pixels, however many spans are behind them, and a state's shape, hatch and colour are one thing.
 */

const FONT = "system-ui, 'DejaVu Sans', sans-serif";
const OKABE_ITO = ["#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7"];
const TILE = 16; // pixels; a power of two, so that `x & (TILE - 1)` wraps around

const rgb = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
const mix = (from, to, share) =>
  from.map((value, i) => Math.round(value + (to[i] - value) * share));
const packed = ([r, g, b]) => ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0; // as canvas stores it
const css = ([r, g, b]) => `rgb(${r}, ${g}, ${b})`;
const readable = ([r, g, b]) => (0.299 * r + 0.587 * g + 0.114 * b > 128 ? "#111418" : "#ffffff");

class Theme {
  constructor(dark) {
    this.dark = dark;
    this.back = rgb(dark ? "#14181d" : "#ffffff");
    this.ink = rgb(dark ? "#e6e9ec" : "#1b1f24");
    this.muted = rgb(dark ? "#9ba6b1" : "#59636e");
    this.line = rgb(dark ? "#303841" : "#dde2e7");
    this.accent = rgb(dark ? "#56B4E9" : "#0072B2");
    this.alarm = rgb(dark ? "#E69F00" : "#D55E00");
    this.states = [];
    this.states[DECODE] = rgb("#009E73");
    this.states[WAITING] = rgb(dark ? "#7d8995" : "#8a95a0");
    this.states[PREFILL] = rgb(dark ? "#56B4E9" : "#0072B2");
    this.states[RECOMPUTED] = rgb("#D55E00");
    this.states[STALLED] = rgb("#F0E442");
    this.states[SWAPPED] = rgb("#CC79A7");
    this.states[PREEMPTED] = rgb("#E69F00");
    this._tiles = new Map();
  }

  /** Colour of a sequence in the block map: seven hues, each plain, lighter and darker. */
  owner(sequence) {
    const colour = rgb(OKABE_ITO[sequence % 7]),
      turn = Math.floor(sequence / 7) % 3;
    if (turn === 0) return colour;
    return turn === 1 ? mix(colour, [255, 255, 255], 0.45) : mix(colour, [0, 0, 0], 0.38);
  }

  /** A tile by its key; `paint(x, y, height)` gives a colour or null, and is asked only once. */
  tile(key, height, paint) {
    const name = key * 4096 + height;
    let tile = this._tiles.get(name);
    if (!tile) {
      height ||= TILE;
      tile = new Uint32Array(TILE * height);
      for (let y = 0; y < height; y++) {
        for (let x = 0; x < TILE; x++) {
          const colour = paint(x, y, height);
          tile[y * TILE + x] = colour ? packed(colour) : 0;
        }
      }
      this._tiles.set(name, tile);
    }
    return tile;
  }
}

// ---- the tiles of the Gantt ------------------------------------------------------------------

const DIVIDER = 8,
  TICK = 9; // between two steps of prefill, and of decode

/** How a state looks: each differs from all others in height, hatch or outline, not only in colour. */
function stateTile(theme, code, height, ratio) {
  const colour = theme.states[code === TICK ? DECODE : code] ?? theme.back,
    small = height < 8 * ratio;
  const gap = small ? 0 : Math.max(1, Math.round(height * 0.1)); // between rows
  const stripe = Math.max(1, Math.round(ratio)),
    period = ratio >= 1.5 ? 16 : 8;
  const dark = mix(colour, [0, 0, 0], 0.55);
  const inside = (y, share) => Math.abs(y + 0.5 - height / 2) <= (height / 2 - gap) * share;
  return theme.tile(code, height, (x, y) => {
    if (small) {
      // no room for shapes; a waiting row is still paler than all that works
      if (code === WAITING) return mix(theme.back, colour, 0.55);
      if (code === TICK) return mix(colour, theme.back, 0.2);
      return colour; // a divider's is the background
    }
    switch (code) {
      case DECODE:
        return inside(y, 0.62) ? colour : null;
      case TICK:
        return inside(y, 0.62) ? mix(colour, theme.back, 0.55) : null;
      case PREFILL:
        return inside(y, 1) ? colour : null;
      case RECOMPUTED: // full height, diagonals
        return !inside(y, 1)
          ? null
          : (x + y) % period < period / 3
            ? mix(colour, [255, 255, 255], 0.72)
            : colour;
      case WAITING: // a thin line
        return Math.abs(y + 0.5 - height / 2) <= Math.max(1, 1.3 * ratio) ? colour : null;
      case PREEMPTED: {
        // low box, crossed
        if (!inside(y, 0.5)) return null;
        const crossed = (x + y) % period < stripe || (x - y + 64 * period) % period < stripe;
        return crossed || !inside(y - stripe, 0.5) || !inside(y + stripe, 0.5) ? dark : colour;
      }
      case SWAPPED: {
        // low box, dotted
        if (!inside(y, 0.5)) return null;
        const half = period / 2,
          dot =
            x % half < 2 * stripe &&
            (y + (Math.floor(x / half) % 2) * 2) % (4 * stripe) < 2 * stripe;
        return dot ? mix(colour, [0, 0, 0], 0.6) : colour;
      }
      case STALLED: // full height, upright bars
        return !inside(y, 1)
          ? null
          : x % (period / 2) < stripe || !inside(y - stripe, 1) || !inside(y + stripe, 1)
            ? mix(colour, [0, 0, 0], 0.65)
            : colour;
      default:
        return null; // DIVIDER: the background shows
    }
  });
}

// ---- the tiles of the block map --------------------------------------------------------------

const LOOSE = 0; // the height of tiles for rows too low for a pattern of their own: it runs through them
const HUES = 21,
  USED = 1,
  OWNED = 2,
  SHARED = OWNED + HUES,
  LEVELS = 4,
  DIM = 1024,
  OUTER = 2048;
// A code is 0 (free), USED (free after use), OWNED + hue or SHARED + hue; + 64 * quarters of the row's
// blocks that are not held, where a row has several; + DIM, where another sequence is highlighted.

function blockTile(theme, code, height, ratio) {
  const kind = code & 63,
    missing = (code >> 6) & 3,
    dim = code & DIM;
  const gap = height >= 6 * ratio ? Math.round(ratio) : 0; // none in loose tiles
  const period = ratio >= 1.5 ? 16 : 8,
    thick = period * (height === LOOSE ? 0.26 : 0.4);
  return theme.tile(OUTER + code, height, (x, y) => {
    if (kind === 0 || (gap && y >= height - gap)) return null;
    if (kind === USED) return mix(theme.back, theme.muted, theme.dark ? 0.24 : 0.2);
    const shared = kind >= SHARED,
      hue = theme.owner(shared ? kind - SHARED : kind - OWNED);
    const faded = mix(theme.back, hue, dim ? 0.22 : 1 - missing / LEVELS);
    if (!shared) return faded;
    const hatch = mix(theme.dark ? [0, 0, 0] : [20, 24, 28], faded, dim ? 0.75 : 0);
    return (x + y) % period < thick ? hatch : faded;
  });
}

// ---- rows of codes to pixels -----------------------------------------------------------------

class Raster {
  /** Pixels of the given size; `rows` are painted into it, then it is put on a canvas at once. */
  resize(width, height) {
    if (this.width === width && this.height === height) return;
    this.width = width;
    this.height = height;
    this.image = new ImageData(Math.max(1, width), Math.max(1, height));
    this.pixels = new Uint32Array(this.image.data.buffer);
    this.codes = new Uint16Array(width);
    this.held = new Int32Array(width + 1); // how many blocks of a row become held, or shared, here
    this.shared = new Int32Array(width + 1);
  }

  clear() {
    this.pixels.fill(0);
  }

  /** Paint one row of codes with its top at `top`; `tileOf(code)` gives the tile of `height`, or,
   * if the pattern is `loose`, one that runs through all rows. */
  row(top, height, tileOf, loose = false) {
    const { codes, pixels, width } = this;
    const from = Math.max(0, -top),
      to = Math.min(height, this.height - top);
    for (let x = 0; x < width;) {
      const code = codes[x];
      let end = x + 1;
      while (end < width && codes[end] === code) end++;
      if (code) {
        const tile = tileOf(code);
        for (let y = from; y < to; y++) {
          const line = (top + y) * width,
            pattern = (loose ? (top + y) & (TILE - 1) : y) * TILE;
          for (let i = x; i < end; i++) pixels[line + i] = tile[pattern + (i & (TILE - 1))];
        }
      }
      x = end;
    }
  }
}
