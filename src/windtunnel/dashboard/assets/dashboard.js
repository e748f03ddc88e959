// What all pages of the dashboard do: the theme, the filter of tables, choosing runs to compare, and staying up to date.

// ---- light or dark ----
const themes = ["", "light", "dark"];

function showTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
  document.getElementById("theme").textContent = theme || "auto";
  document.dispatchEvent(new Event("theme-changed"));
}

showTheme(localStorage.getItem("theme") || "");
document.getElementById("theme").addEventListener("click", () => {
  const next = themes[(themes.indexOf(localStorage.getItem("theme") || "") + 1) % themes.length];
  localStorage.setItem("theme", next);
  showTheme(next);
});

// ---- filter ----
function applyFilter() {
  const input = document.getElementById("filter");
  if (!input) return;
  const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
  let shown = 0;
  let all = 0;
  for (const row of document.querySelectorAll("main tbody tr")) {
    const text = row.textContent.toLowerCase();
    row.hidden = !words.every((word) => text.includes(word));
    all += 1;
    shown += !row.hidden;
  }
  document.getElementById("count").textContent = words.length ? `${shown} of ${all}` : `${all}`;
}

document.addEventListener("input", (event) => {
  if (event.target.id === "filter") applyFilter();
});
document.addEventListener("keydown", (event) => {
  const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
  const input = document.getElementById("filter");
  if (event.key === "/" && !typing && input) {
    event.preventDefault();
    input.focus();
  }
});

// ---- runs to compare ----
const chosen = new Set();

function showChosen() {
  const button = document.getElementById("compare");
  if (!button) return;
  button.href = "/compare?" + [...chosen].map((name) => "run=" + encodeURIComponent(name)).join("&");
  button.textContent = chosen.size ? `compare ${chosen.size}` : "compare";
}

function addChoices() {
  if (!document.getElementById("compare")) return;
  for (const link of document.querySelectorAll('main td:first-child a[href^="/run/"]')) {
    if (link.previousElementSibling || !link.closest("[data-compares]")) continue;
    const box = document.createElement("input");
    const name = decodeURIComponent(link.getAttribute("href").slice("/run/".length));
    box.type = "checkbox";
    box.checked = chosen.has(name);
    box.title = "compare";
    box.setAttribute("aria-label", "compare " + name);
    box.addEventListener("change", () => {
      if (box.checked) chosen.add(name);
      else chosen.delete(name);
      showChosen();
    });
    link.before(box);
  }
  // On a phone a run is a card: each figure stands below its label.
  for (const cell of document.querySelectorAll("main .wide td")) {
    cell.dataset.label = cell.closest("table").tHead.rows[0].cells[cell.cellIndex].textContent;
  }
  showChosen();
}

// ---- up to date ----
const ASK_AGAIN_MS = 2000;
let tag = null;

// Which columns tables are sorted by, to sort new ones the same way.
function sortings() {
  return [...document.querySelectorAll("main table")].map((table) => {
    const head = table.querySelector("th[aria-sort]");
    return head && [[...head.parentNode.children].indexOf(head), head.getAttribute("aria-sort") === "descending"];
  });
}

// What a reader has opened, and where the keyboard is, by its kind, place and words.
const OPENED = "main summary, main button, main a, main select, main [tabindex]";
const labelled = () => [...document.querySelectorAll(OPENED)].map((element, at) => [`${element.tagName} ${element.tagName === "SELECT" ? at : element.textContent}`, element]);

function replaceMain(text) {
  const fresh = new DOMParser().parseFromString(text, "text/html").querySelector("main");
  const main = document.querySelector("main");
  const filter = document.getElementById("filter");
  const sorted = sortings();
  const picked = [...document.querySelectorAll("main select")].map((select) => select.value);
  const kept = filter && [filter.value, document.activeElement === filter, filter.selectionStart];
  const before = labelled();
  const opened = new Set(before.filter(([, element]) => element.parentNode.open).map(([label]) => label));
  const focused = before.find(([, element]) => element === document.activeElement);
  main.replaceChildren(...fresh.childNodes);
  if (kept) {
    const input = document.getElementById("filter");
    input.value = kept[0];
    if (kept[1]) {
      input.focus();
      input.setSelectionRange(kept[2], kept[2]);
    }
  }
  document.querySelectorAll("main table").forEach((table, at) => {
    if (sorted[at]) sortTable(table.querySelectorAll("th")[sorted[at][0]], sorted[at][1]);
  });
  prepare();
  document.querySelectorAll("main select").forEach((select, at) => {
    if (picked[at] === undefined || ![...select.options].some((option) => option.value === picked[at])) return;
    select.value = picked[at];
    select.dispatchEvent(new Event("change"));
  });
  for (const [label, element] of labelled()) {
    if (opened.has(label)) element.parentNode.open = true;
    if (focused && focused[0] === label) element.focus({ preventScroll: true });
  }
}

async function askAgain() {
  try {
    const response = await fetch(location.href, { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store" });
    document.body.classList.remove("away");
    if (response.status === 200) {
      const text = await response.text();
      if (tag) replaceMain(text);
      tag = response.headers.get("ETag");
    }
  } catch {
    document.body.classList.add("away");
  }
}

// A slow page is reloaded less often.
async function keepAsking() {
  const began = performance.now();
  if (!document.hidden) await askAgain();
  setTimeout(keepAsking, ASK_AGAIN_MS + 10 * (performance.now() - began));
}

function prepare() {
  addChoices();
  applyFilter();
  document.dispatchEvent(new Event("main-shown"));
}

prepare();
if (document.querySelector("main[data-live]")) {
  keepAsking();
}
