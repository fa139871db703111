"use strict";
/* Numbers as words, in the playground and in the page of a trace. */

const count = (value) => value.toLocaleString("en-GB");
const plural = (value, noun) => `${count(value)} ${noun}${value === 1 ? "" : "s"}`;

function seconds(value) {
  const [scaled, unit] =
    value < 0.9995e-3
      ? [value * 1e6, "\u00b5s"]
      : value < 0.9995
        ? [value * 1e3, "ms"]
        : [value, "s"];
  const digits = scaled >= 99.95 ? 0 : scaled >= 9.995 ? 1 : 2;
  return `${scaled.toLocaleString("en-GB", { maximumFractionDigits: digits })} ${unit}`;
}
