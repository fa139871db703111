"use strict";
/* Start. `playground` is there for the console and for tests. */

window.playground = new App();
playground.ready = playground.start();
