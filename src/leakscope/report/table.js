"use strict";
(() => {
  const table = document.getElementById("job-table");
  if (!table) return;
  const bodies = Array.from(table.tBodies);
  const headers = Array.from(table.tHead.rows[0].cells);

  // Missing values come last whichever way the column is sorted; equal values keep the order of the plan.
  const sortBy = (column, numeric, direction) => {
    const value = (body) => body.rows[0].cells[column].dataset.value;
    const ordered = bodies.slice().sort((a, b) => {
      const x = value(a), y = value(b);
      if (x === "" || y === "") return (x === "") - (y === "");
      const difference = numeric ? Number(x) - Number(y) : x < y ? -1 : x > y ? 1 : 0;
      return direction * difference;
    });
    table.append(...ordered);
  };

  table.tHead.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    const header = button.closest("th");
    const numeric = "numeric" in button.dataset;
    const before = header.getAttribute("aria-sort");
    const first = numeric && button.dataset.column !== "0" ? "descending" : "ascending";
    const other = first === "descending" ? "ascending" : "descending";
    const order = before === first ? other : first;
    for (const cell of headers) cell.removeAttribute("aria-sort");
    header.setAttribute("aria-sort", order);
    sortBy(Number(button.dataset.column), numeric, order === "ascending" ? 1 : -1);
  });

  const filter = document.getElementById("filter");
  const count = document.getElementById("count");
  // A space between the pieces, or the end of one cell and the start of the next would read as one word.
  const textOf = (body) => {
    const walker = document.createTreeWalker(body, NodeFilter.SHOW_TEXT);
    const pieces = [];
    while (walker.nextNode()) pieces.push(walker.currentNode.data);
    return pieces.join(" ").toLowerCase();
  };
  const texts = bodies.map(textOf);
  const apply = () => {
    const terms = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    bodies.forEach((body, n) => {
      body.hidden = !terms.every((term) => texts[n].includes(term));
      if (!body.hidden) shown += 1;
    });
    count.textContent = `${shown} of ${bodies.length} jobs`;
  };
  filter.addEventListener("input", apply);
  apply();
})();
