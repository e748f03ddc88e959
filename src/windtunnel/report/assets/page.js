// What every page with tables does: they sort by a click (or Enter) on a header.

function sortValue(row, at) {
  const cell = row.children[at];
  if (cell.dataset.value !== undefined) return cell.dataset.value === "" ? null : Number(cell.dataset.value);
  const text = cell.textContent.trim();
  const plain = text.replace(/[,%+s]/g, "");
  return text === "" ? null : plain !== "" && !isNaN(plain) ? Number(plain) : text;
}

function sortTable(head, descending) {
  const at = [...head.parentNode.children].indexOf(head);
  const body = head.closest("table").tBodies[0];
  for (const other of head.parentNode.children) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", descending ? "descending" : "ascending");
  const order = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b)));
  const keyed = [...body.rows].map((row) => [sortValue(row, at), row]);
  // Rows without a value stay at the end, whichever way.
  keyed.sort(([a], [b]) => (a === null || b === null ? (a === null) - (b === null) : (descending ? -1 : 1) * order(a, b)));
  body.append(...keyed.map(([, row]) => row));
}

function headerOf(event) {
  const head = event.target.closest("th");
  return head && head.closest("table").tBodies.length && !head.querySelector("a") ? head : null;
}

document.addEventListener("click", (event) => {
  const head = headerOf(event);
  if (head) sortTable(head, head.getAttribute("aria-sort") !== "descending");
});
document.addEventListener("keydown", (event) => {
  const head = event.key === "Enter" && headerOf(event);
  if (head) sortTable(head, head.getAttribute("aria-sort") !== "descending");
});
