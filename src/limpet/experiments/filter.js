// A text filter over folded tables and scatter plots: rows and points without all of its words are hidden.
"use strict";
(() => {
  const main = document.querySelector("main");
  const input = Object.assign(document.createElement("input"), { type: "search", placeholder: "a sampler or a family" });
  const caption = document.createElement("label"), found = document.createElement("span"), bar = document.createElement("p");
  caption.append("Filter ", input);
  found.setAttribute("role", "status");
  bar.className = "filter";
  bar.append(caption, found);
  main.append(bar);
  const folds = [...main.querySelectorAll("details.rows, details.rows details")];
  const rows = [...main.querySelectorAll("details.rows tbody tr")];
  const names = rows.map((row) => [...row.cells].slice(0, 2).map((cell) => cell.textContent).join(" ").toLowerCase());
  let before = null; // which parts were open before a filter was typed

  input.addEventListener("input", () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    if (words.length && before === null) before = folds.map((fold) => fold.open);
    rows.forEach((row, i) => { row.hidden = !words.every((word) => names[i].includes(word)); });
    folds.forEach((fold, i) => {
      const isShown = fold.querySelector("tbody tr:not([hidden])") !== null;
      fold.hidden = !isShown;
      fold.open = words.length ? isShown : before ? before[i] : fold.open;
    });
    if (!words.length) before = null;
    found.textContent = words.length ? `${rows.filter((row) => !row.hidden).length} of ${rows.length} rows` : "";
    document.dispatchEvent(new CustomEvent("filter", { detail: words }));
  });
})();
