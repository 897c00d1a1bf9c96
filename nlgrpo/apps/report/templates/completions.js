// Shows the completions of a step, or those that a search finds. Texts are added to the page a few prompts at a time,
// when the reader comes near its end. They are only ever set as text, never as HTML.
"use strict";
{
  const AT_A_TIME = 12; // prompts
  const SHORT = 600; // characters of a text that are shown at first

  const data = document.getElementById("completions-data");
  const { colours, sources } = data ? JSON.parse(data.textContent) : { sources: [] };
  const [source, step, order, search, returned, count, list] = [
    "source", "step", "order", "search", "returned", "count", "list",
  ].map((name) => document.getElementById("completions-" + name));
  let found = []; // the groups that are shown, with the samples of each column
  let before = ""; // the step that was chosen when a search began
  let added = 0; // how many of them are on the page

  function element(name, text, kind) {
    const made = document.createElement(name);
    if (text !== undefined) made.textContent = text;
    if (kind) made.className = kind;
    return made;
  }

  function chosen() {
    return sources[Number(source.value)];
  }

  // A text whose rest a button adds. The end of a prompt is more telling than its beginning.
  function long(text, end) {
    const made = element("p", text, "text");
    made.dir = "auto"; // also for text that is read from right to left
    if (text.length <= SHORT) return [made];
    made.textContent = end ? "… " + text.slice(-SHORT) : text.slice(0, SHORT) + " …";
    const more = element("button", "show all " + text.length.toLocaleString("en") + " characters");
    more.type = "button";
    more.addEventListener("click", () => {
      made.textContent = text;
      more.remove();
    });
    return [made, more];
  }

  function card(sample) {
    const [text, numbers, note, by] = sample;
    const made = element("div", undefined, by ? "sample returned" : "sample");
    if (by) made.append(element("p", "returned by " + by, "badge"));
    made.append(...long(text, false));
    const names = chosen().numbers;
    const parts = numbers.flatMap((value, i) => (value === null ? [] : [names[i] + " " + Number(value.toPrecision(4))]));
    if (note) parts.push(note);
    made.append(element("p", parts.join(" · "), "soft"));
    return made;
  }

  function column(one, several) {
    const made = element("div");
    if (several) {
      const name = element("p", one.name);
      const dot = element("span", undefined, "dot");
      dot.style.background = colours[one.name] || "currentColor";
      name.prepend(dot);
      made.append(name);
    }
    made.append(...one.samples.map(card));
    return made;
  }

  function prompt({ group, columns }) {
    const made = element("section", undefined, "group");
    if (group.step !== null) made.append(element("p", "step " + group.step, "soft"));
    const text = element("div", undefined, "prompt");
    text.append(...long(group.prompt, true));
    const cards = element("div", undefined, columns.length > 1 ? "pair" : "cards");
    if (columns.length > 1) cards.append(...columns.map((one) => column(one, true)));
    else cards.append(...columns.flatMap((one) => one.samples.map(card)));
    made.append(text, cards);
    return made;
  }

  const end = element("div");
  const watcher = new IntersectionObserver((seen) => seen.some((one) => one.isIntersecting) && add(), {
    root: list,
    rootMargin: "1500px",
  });

  function add() {
    const more = found.slice(added, added + AT_A_TIME);
    list.append(...more.map(prompt), end);
    added += more.length;
    watcher.unobserve(end); // observed again, it is looked at again: the page may have room for more
    if (added < found.length) watcher.observe(end);
  }

  function ordered(samples) {
    const by = Number(order.value);
    if (by < 0) return samples;
    const value = (sample) => sample[1][by] ?? -Infinity;
    return [...samples].sort((a, b) => (value(b) > value(a)) - (value(b) < value(a)));
  }

  function show() {
    const words = search.value.toLowerCase();
    found = [];
    let completions = 0;
    for (const group of chosen().groups) {
      if (step.value !== "" && group.step !== Number(step.value)) continue;
      const whole = words === "" || group.prompt.toLowerCase().includes(words);
      const columns = [];
      for (const one of group.columns) {
        let samples = one.samples;
        if (!whole) samples = samples.filter((sample) => sample[0].toLowerCase().includes(words));
        if (returned.checked) samples = samples.filter((sample) => sample[3]);
        if (samples.length) columns.push({ name: one.name, samples: ordered(samples) });
        completions += samples.length;
      }
      if (columns.length) found.push({ group, columns });
    }
    const missing = chosen().left_out;
    const prompts = found.length === 1 ? "1 prompt" : `${found.length.toLocaleString("en")} prompts`;
    count.textContent = `${completions.toLocaleString("en")} completions of ${prompts}`;
    if (missing) count.textContent += `; ${missing.toLocaleString("en")} prompts are left out, to keep the page small`;
    list.replaceChildren();
    list.scrollTop = 0;
    added = 0;
    add();
  }

  // The steps and the numbers of the chosen source.
  function open() {
    const steps = [...new Set(chosen().groups.map((group) => group.step))].filter((one) => one !== null);
    step.replaceChildren(new Option("all", ""), ...steps.map((one) => new Option(one)));
    if (steps.length) step.value = steps[steps.length - 1];
    before = step.value;
    search.value = "";
    for (const one of [step.parentElement, ...document.querySelectorAll("#completions-before, #completions-after")]) {
      one.hidden = steps.length < 2;
    }
    const marked = chosen().groups.some((group) => group.columns.some((one) => one.samples.some((sample) => sample[3])));
    returned.parentElement.hidden = !marked;
    returned.checked = returned.checked && marked;
    order.replaceChildren(new Option("as sampled", -1), ...chosen().numbers.map((name, i) => new Option(name, i)));
    show();
  }

  function move(by) {
    const place = step.selectedIndex + by;
    if (place < 1 || place >= step.options.length) return;
    step.selectedIndex = place;
    show();
  }

  if (sources.length) {
    source.append(...sources.map((one, i) => new Option(one.name, i)));
    source.addEventListener("change", open);
    for (const control of [step, order, returned]) control.addEventListener("change", show);
    let waiting = 0;
    search.addEventListener("input", () => {
      if (search.value !== "" && step.value !== "") before = step.value;
      step.value = search.value !== "" ? "" : before; // a search is in all steps
      clearTimeout(waiting);
      waiting = setTimeout(show, 150);
    });
    document.getElementById("completions-before").addEventListener("click", () => move(-1));
    document.getElementById("completions-after").addEventListener("click", () => move(1));
    document.getElementById("completions-tools").hidden = false;
    open();
  }
}
