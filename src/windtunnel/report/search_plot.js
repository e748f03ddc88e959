// A scatter of deployments whose axes, colours and filters the reader chooses. `root` holds the controls, `data` the
// points, best first: figures (names of values), names (of settings), choices and values (of each point), x and y.
function drawSearch(root, data) {
  const part = (name) => root.querySelector("." + name);
  const canvas = part("plot");
  const pen = canvas.getContext("2d");
  const palette = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#7f7f7f"];
  const box = { left: 78, right: canvas.width - 16, top: 14, bottom: canvas.height - 48 };
  let shown = [];

  function fill(select, names, first) {
    for (const name of names) {
      const option = document.createElement("option");
      option.value = option.textContent = name;
      option.selected = name === first;
      select.append(option);
    }
    select.addEventListener("change", draw);
  }

  function addFilter(name, at) {
    const label = document.createElement("label");
    const select = document.createElement("select");
    label.textContent = name + " ";
    select.dataset.at = at;
    label.append(select);
    part("filters").append(label, " ");
    fill(select, ["any", ...new Set(data.choices.map((choice) => choice[at]))], "any");
  }

  function kept(x, y) {
    const filters = [...part("filters").querySelectorAll("select")].filter((one) => one.value !== "any");
    return data.values
      .map((_, index) => index)
      .filter((index) => data.values[index][x] !== null && data.values[index][y] !== null)
      .filter((index) => filters.every((one) => data.choices[index][one.dataset.at] === one.value));
  }

  function range(indices, at) {
    let low = Infinity;
    let high = -Infinity;
    for (const index of indices) {
      low = Math.min(low, data.values[index][at]);
      high = Math.max(high, data.values[index][at]);
    }
    const margin = 0.04 * (high - low || Math.abs(high) || 1);
    return [low - margin, high + margin];
  }

  function axes(x, y, across, up, toX, toY) {
    pen.globalAlpha = 0.5;
    pen.strokeRect(box.left, box.top, box.right - box.left, box.bottom - box.top);
    pen.globalAlpha = 1;
    for (let step = 0; step <= 4; step++) {
      const atX = across[0] + ((across[1] - across[0]) * step) / 4;
      const atY = up[0] + ((up[1] - up[0]) * step) / 4;
      pen.textAlign = "center";
      pen.fillText(Number(atX.toPrecision(3)), toX(atX), box.bottom + 16);
      pen.textAlign = "right";
      pen.fillText(Number(atY.toPrecision(3)), box.left - 6, toY(atY) + 4);
    }
    pen.textAlign = "center";
    pen.fillText(data.figures[x], (box.left + box.right) / 2, canvas.height - 10);
    pen.save();
    pen.translate(14, (box.top + box.bottom) / 2);
    pen.rotate(-Math.PI / 2);
    pen.fillText(data.figures[y], 0, 0);
    pen.restore();
  }

  const sign = (at) => (/^(requests|output_tokens)/.test(data.figures[at]) ? -1 : 1);

  function frontier(indices, x, y, toX, toY) {
    const value = (index, at) => sign(at) * data.values[index][at];
    const order = [...indices].sort((a, b) => value(a, x) - value(b, x) || value(a, y) - value(b, y));
    let best = Infinity;
    pen.beginPath();
    for (const index of order) {
      if (value(index, y) < best) {
        best = value(index, y);
        pen.lineTo(toX(data.values[index][x]), toY(data.values[index][y]));
      }
    }
    pen.setLineDash([5, 4]);
    pen.stroke();
    pen.setLineDash([]);
  }

  function legend(kinds) {
    part("legend").replaceChildren();
    kinds.forEach((kind, position) => {
      const entry = document.createElement("span");
      entry.textContent = "\u25cf " + kind + "  ";
      entry.style.color = palette[position % palette.length];
      part("legend").append(entry);
    });
  }

  function draw() {
    const x = data.figures.indexOf(part("across").value);
    const y = data.figures.indexOf(part("up").value);
    const colour = data.names.indexOf(part("colour").value);
    const ink = getComputedStyle(document.body).color;
    const indices = kept(x, y);
    pen.clearRect(0, 0, canvas.width, canvas.height);
    pen.font = "12px system-ui";
    pen.fillStyle = pen.strokeStyle = ink;
    shown = [];
    if (!indices.length) {
      pen.fillText("no point", canvas.width / 2, canvas.height / 2);
      return;
    }
    const across = range(indices, x);
    const up = range(indices, y);
    const toX = (value) => box.left + ((value - across[0]) / (across[1] - across[0])) * (box.right - box.left);
    const toY = (value) => box.bottom - ((value - up[0]) / (up[1] - up[0])) * (box.bottom - box.top);
    axes(x, y, across, up, toX, toY);
    const kinds = [...new Set(data.choices.map((choice) => choice[colour]))];
    for (const index of [...indices].reverse()) {
      const point = { x: toX(data.values[index][x]), y: toY(data.values[index][y]), index };
      pen.globalAlpha = 0.65;
      pen.fillStyle = palette[kinds.indexOf(data.choices[index][colour]) % palette.length];
      pen.beginPath();
      pen.arc(point.x, point.y, index === 0 ? 7 : 3, 0, 2 * Math.PI);
      pen.fill();
      shown.push(point);
    }
    pen.globalAlpha = 1;
    pen.strokeStyle = ink;
    frontier(indices, x, y, toX, toY);
    legend(kinds);
  }

  function describe(index) {
    const settings = data.names.map((name, at) => name + " " + data.choices[index][at]);
    const figures = data.figures
      .map((name, at) => [name, data.values[index][at]])
      .filter(([, value]) => value !== null)
      .map(([name, value]) => name + " " + Number(value.toPrecision(4)));
    return settings.join(", ") + ": " + figures.join(", ");
  }

  canvas.addEventListener("mousemove", (event) => {
    const at = canvas.getBoundingClientRect();
    const x = ((event.clientX - at.left) * canvas.width) / at.width;
    const y = ((event.clientY - at.top) * canvas.height) / at.height;
    const far = (point) => (point.x - x) ** 2 + (point.y - y) ** 2;
    const near = shown.reduce((best, point) => (best && far(best) <= far(point) ? best : point), null);
    part("tip").textContent = near && far(near) < 144 ? describe(near.index) : "point at a deployment";
  });
  fill(part("across"), data.figures, data.x);
  fill(part("up"), data.figures, data.y);
  fill(part("colour"), data.names, data.names[0]);
  data.names.forEach(addFilter);
  draw();
}
function drawSearches() {
  for (const root of document.querySelectorAll(".search")) {
    if (!root.dataset.drawn) drawSearch(root, JSON.parse(root.querySelector(".points").textContent));
    root.dataset.drawn = "1";
  }
}
drawSearches();
// The dashboard shows new points in place.
document.addEventListener("main-shown", drawSearches);
