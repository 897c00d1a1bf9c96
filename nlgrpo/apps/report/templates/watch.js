// Asks for the state every two seconds, and loads the report again when it has changed.
"use strict";
const frame = document.querySelector("iframe");
const line = document.querySelector("p");
let shown = -1;
let place = 0;
let loading = false;

async function follow() {
  try {
    const state = await (await fetch("state", { cache: "no-store" })).json();
    line.textContent = state.lines.join("   ");
    if (state.version !== shown) {
      if (!loading) place = frame.contentWindow.scrollY;
      loading = true;
      frame.src = "report?" + state.version;
      shown = state.version;
    }
  } catch (error) {
    line.textContent = "nlgrpo watch has ended";
  }
  setTimeout(follow, 2000);
}

// A reader who has scrolled while the report loaded stays there.
frame.onload = () => {
  if (loading && !frame.contentWindow.scrollY) frame.contentWindow.scrollTo(0, place);
  loading = false;
};
follow();
