// What every page of figures and tables does: tables sort by a click (or Enter) on a header, and curves tell their values
// where the pointer is.

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

const curves = new WeakMap();

// [x, y] in the figure's pixels of every point of a path.
function pointsOf(path) {
  if (!curves.has(path)) {
    const points = path.getAttribute("d").slice(1).split("L");
    curves.set(path, points.map((point) => point.split(" ").map(Number)));
  }
  return curves.get(path);
}

function heightAt(points, x) {
  if (x < points[0][0] || x > points[points.length - 1][0]) return null;
  let low = 0;
  let high = points.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (points[middle][0] <= x) low = middle;
    else high = middle;
  }
  const [x0, y0] = points[low];
  const [x1, y1] = points[high];
  return x1 === x0 ? y1 : y0 + ((y1 - y0) * (x - x0)) / (x1 - x0);
}

// The value that a pixel stands for on an axis given as "low high start end lin|log".
function valueAt(axis, pixel) {
  const [low, high, start, end, kind] = axis.split(" ");
  const share = (pixel - start) / (end - start);
  return kind === "log" ? low * (high / low) ** share : Number(low) + share * (high - low);
}

const figureTip = document.createElement("div");
figureTip.className = "tooltip";
figureTip.hidden = true;

document.addEventListener("pointermove", (event) => {
  const svg = event.target.closest && event.target.closest("svg[data-across]");
  if (!svg) {
    figureTip.hidden = true;
    return;
  }
  if (!figureTip.isConnected) document.body.append(figureTip);
  const x = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse()).x;
  const lines = [];
  for (const path of svg.querySelectorAll("path[data-label]")) {
    const y = heightAt(pointsOf(path), x);
    if (y !== null) lines.push(path.dataset.label + "  " + Number(valueAt(svg.dataset.up, y).toPrecision(4)));
  }
  figureTip.hidden = !lines.length;
  const at = svg.dataset.label + "  " + Number(valueAt(svg.dataset.across, x).toPrecision(4));
  figureTip.textContent = [at, ...lines].join("\n");
  const left = Math.min(event.pageX + 14, document.documentElement.clientWidth - figureTip.offsetWidth - 8);
  figureTip.style.left = left + "px";
  figureTip.style.top = event.pageY + 14 + "px";
});
