// Sorts a table by the column whose head is clicked; a second click reverses the order.
// Cells are compared by their first number if all have one, else as text; empty cells come last.
document.addEventListener("click", (event) => {
  const head = event.target.closest(".md-typeset table:not([class]) thead th");
  if (!head) return;
  const column = head.cellIndex, body = head.closest("table").tBodies[0];
  const descending = head.getAttribute("aria-sort") === "ascending";
  for (const other of head.parentElement.cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", descending ? "descending" : "ascending");

  const text = (row) => row.cells[column].textContent.trim();
  const number = (row) => parseFloat(text(row).replace(/,(?=\d{3})/g, "").match(/[-+]?\d*\.?\d+/)?.[0]);
  const rows = [...body.rows], filled = rows.filter((row) => !/^-?$/.test(text(row)));
  const numeric = filled.every((row) => /^[-+\d.]/.test(text(row)) && !isNaN(number(row)));
  filled.sort(numeric ? (a, b) => number(a) - number(b) : (a, b) => text(a).localeCompare(text(b)));
  if (descending) filled.reverse();
  body.append(...filled, ...rows.filter((row) => !filled.includes(row)));
});
