// Sorts a table of the class "sorts" by a click on a heading, and filters it by the columns with `data-filter`.
// Without scripts, tables are shown in their original order.
"use strict";
for (const table of document.querySelectorAll("table.sorts")) {
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
  const rows = [...body.rows];
  const chosen = new Map(); // the selected value of each filter, by the index of its column

  function text(row, i) {
    return row.cells[i].dataset.v ?? row.cells[i].textContent;
  }

  function compare(a, b, numbers) {
    return numbers ? a - b : a.localeCompare(b, "en", { numeric: true });
  }

  function sort(i) {
    const down = heads[i].getAttribute("aria-sort") === "ascending";
    const numbers = heads[i].classList.contains("n");
    heads.forEach((head) => head.removeAttribute("aria-sort"));
    heads[i].setAttribute("aria-sort", down ? "descending" : "ascending");
    const known = rows.filter((row) => text(row, i) !== "");
    const rest = rows.filter((row) => text(row, i) === "");
    known.sort((a, b) => compare(text(a, i), text(b, i), numbers) * (down ? -1 : 1));
    body.append(...known, ...rest);
  }

  function filter() {
    for (const row of rows) {
      row.hidden = [...chosen].some(([i, value]) => value !== "" && text(row, i) !== value);
    }
  }

  function selection(i, name) {
    const select = document.createElement("select");
    select.append(new Option("all", ""));
    for (const value of new Set(rows.map((row) => text(row, i)))) {
      if (value !== "") select.append(new Option(value));
    }
    select.addEventListener("change", () => {
      chosen.set(i, select.value);
      filter();
    });
    const label = document.createElement("label");
    label.append(name + " ", select);
    return label;
  }

  const bar = document.createElement("div");
  bar.className = "filter";
  heads.forEach((head, i) => {
    const name = head.textContent;
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = name;
    button.addEventListener("click", () => sort(i));
    head.replaceChildren(button);
    if (head.hasAttribute("data-filter")) bar.append(selection(i, name));
  });
  if (bar.childElementCount) table.parentElement.before(bar);
}
