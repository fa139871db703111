"use strict";
/* Read the data and start. `traceView` is there for those who open the console, and for tests. */

{
  const started = performance.now();
  const model = new Model(JSON.parse(document.getElementById("data").textContent));
  const parsed = performance.now();
  const app = new App(model);
  if (!model.numColumns) {
    document
      .getElementById("details")
      .replaceChildren(
        element("p", "This trace has no steps: nothing was generated while it was recorded."),
      );
  }
  window.traceView = {
    app,
    model,
    milliseconds: { parse: parsed - started, start: performance.now() - parsed },
  };
}
