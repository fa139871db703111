"use strict";
/* Elements, and numbers and texts as words. Text of the model or the server is only ever
 * appended as text, never as markup. */

const byId = (id) => document.getElementById(id);

/** An element such as `element("dd.total", "12")`; children are elements or text. */
function element(tag, ...children) {
  const [name, ...classes] = tag.split("."),
    made = document.createElement(name);
  if (classes.length) made.className = classes.join(" ");
  made.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
  return made;
}

const rate = (value) =>
  value.toLocaleString("en-GB", { maximumFractionDigits: value >= 99.95 ? 0 : 1 });

/** A probability as percentage. Only a certain event has 100%. */
function percent(value) {
  if (value > 0 && value < 0.0001) return "<0.01%";
  if (value < 1 && value > 0.9999) return ">99.99%";
  const digits = value < 0.0995 || (value > 0.9905 && value < 1) ? 2 : 1;
  return `${(value * 100).toFixed(value === 1 || value === 0 ? 0 : digits)}%`;
}

const CONTROLS = /[\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;

/** A token in quotes, with everything escaped that is invisible or changes the text around it. */
function quoted(text) {
  return JSON.stringify(text).replace(
    CONTROLS,
    (character) => `\\u${character.charCodeAt(0).toString(16).padStart(4, "0")}`,
  );
}

/** A message in one line, cut where it is longer than a sentence should be. */
function oneLine(text) {
  const line = String(text).replace(/\s+/g, " ").replace(CONTROLS, "").trim();
  return line.length > 400 ? `${line.slice(0, 399)}\u2026` : line;
}
