// What every page does: tables sort by a click (or Enter) on a header, and figures are saved.

const UNITS = { us: 1e-6, ms: 1e-3, min: 60, h: 3600, days: 86400, KiB: 2 ** 10, MiB: 2 ** 20, GiB: 2 ** 30, TiB: 2 ** 40 };
const PREFIXES = { k: 1e3, M: 1e6, G: 1e9, T: 1e12, P: 1e15 };

function sortValue(row, at) {
  const cell = row.children[at];
  if (cell.dataset.value !== undefined) return cell.dataset.value === "" ? null : Number(cell.dataset.value);
  const text = cell.textContent.trim();
  const [, number, unit] = text.match(/^[+$×±]?(-?[\d,]*\.?\d+) ?(\S*)$/) || [];
  if (number === undefined) return text === "" ? null : text;
  return Number(number.replaceAll(",", "")) * (UNITS[unit] || PREFIXES[/^[kMGTP](?=[BbF]|$)/.exec(unit)] || 1);
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

// Figures are saved as PNG or CSV: those of bars here, the others by figures.js.
function saveFile(blob, caption, kind) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = `${caption.toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-|-$/g, "").slice(0, 60) || "figure"}.${kind}`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

function saveCsv(rows, caption) {
  const cell = (value) => (value === null || value === undefined ? "" : /[",\n]/.test(value) ? `"${String(value).replaceAll('"', '""')}"` : value);
  const text = rows.map((row) => row.map(cell).join(",")).join("\n");
  saveFile(new Blob([`${text}\n`], { type: "text/csv" }), caption, "csv");
}

// A colour as a canvas takes it.
function resolved(colour) {
  const probe = document.body.appendChild(document.createElement("span"));
  probe.style.color = colour;
  const value = getComputedStyle(probe).color;
  probe.remove();
  return value;
}

// A canvas of that many CSS pixels, with a caption in its first 28; its pen.
function captionedCanvas(width, height, caption) {
  const canvas = document.createElement("canvas");
  const dots = devicePixelRatio || 1;
  [canvas.width, canvas.height] = [width * dots, height * dots];
  const pen = canvas.getContext("2d");
  pen.scale(dots, dots);
  pen.fillStyle = resolved("var(--paper)");
  pen.fillRect(0, 0, width, height);
  pen.fillStyle = resolved("var(--ink)");
  pen.font = "600 14px system-ui";
  pen.fillText(caption, 8, 20);
  pen.font = "12px system-ui";
  return pen;
}

function savePicture(pen, caption) {
  pen.canvas.toBlob((blob) => saveFile(blob, caption, "png"));
}

function toolButton(tools, caption, text, label, act) {
  const made = document.createElement("button");
  made.type = "button";
  made.textContent = text;
  made.title = label;
  made.setAttribute("aria-label", `${label}: ${caption}`);
  made.addEventListener("click", act);
  tools.append(made);
  return made;
}

function saveBars(bars, caption) {
  const [row, middle, longest] = [22, 260, Math.max(...bars.map(([, share]) => share))];
  const pen = captionedCanvas(760, 36 + row * bars.length, caption);
  bars.forEach(([name, share, text], at) => {
    const top = 30 + row * at;
    pen.fillStyle = resolved("var(--link)");
    pen.fillRect(middle, top, longest ? (300 * share) / longest : 0, 14);
    pen.fillStyle = resolved("var(--ink)");
    pen.fillText(name, 8, top + 11, middle - 16);
    pen.fillText(text, middle + 310, top + 11);
  });
  savePicture(pen, caption);
}

function addBarTools() {
  for (const table of document.querySelectorAll("table.bars")) {
    if (table.previousElementSibling?.className === "tools") continue;
    const caption = table.closest("figure").querySelector("figcaption")?.textContent || "figure";
    const bars = [...table.rows].map(({ cells, dataset }) => [cells[0].textContent, Number(dataset.share), cells[2].textContent]);
    const tools = document.createElement("div");
    tools.className = "tools";
    table.before(tools);
    toolButton(tools, caption, "PNG", "save as PNG", () => saveBars(bars, caption));
    toolButton(tools, caption, "CSV", "save as CSV", () => saveCsv([["name", "share", "shown"], ...bars], caption));
  }
}

document.addEventListener("main-shown", addBarTools);
addBarTools();
