// A scatter of points whose axes, colours and filters the reader chooses. `root` holds the controls, `data` the points,
// best first: figures (what values are called), more (whether more of a figure is better), names (of settings), choices,
// values and margins (of each point; null where it met one stream of requests alone), x and y.
function drawSearch(root, data) {
  const part = (name) => root.querySelector("." + name);
  const canvas = part("plot");
  const pen = canvas.getContext("2d");
  const palette = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#7f7f7f"];
  const box = { left: 78, right: 0, top: 14, bottom: 0 };
  let shown = [];

  // As many pixels as the window has for it, so that letters keep their size on narrow ones.
  function fit() {
    const width = Math.min(Math.max(root.clientWidth, 280), 900);
    const height = Math.max(Math.round(width / 2), 280);
    const dots = window.devicePixelRatio || 1;
    canvas.width = width * dots;
    canvas.height = height * dots;
    canvas.style.width = width + "px";
    canvas.style.height = height + "px";
    pen.setTransform(dots, 0, 0, dots, 0, 0);
    Object.assign(box, { right: width - 16, bottom: height - 48, width, height });
  }

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
      const off = data.margins[index][at] ?? 0;
      low = Math.min(low, data.values[index][at] - off);
      high = Math.max(high, data.values[index][at] + off);
    }
    const margin = 0.04 * (high - low || Math.abs(high) || 1);
    return [low < 0 ? low - margin : Math.max(low - margin, 0), high + margin];
  }

  // Round numbers within a range, five or so.
  function ticks([low, high], count) {
    const raw = (high - low) / count;
    const size = 10 ** Math.floor(Math.log10(raw));
    const step = size * [1, 2, 5, 10].find((times) => times * size >= raw);
    const found = [];
    for (let at = Math.ceil(low / step); at * step <= high; at++) found.push(Number((at * step).toPrecision(6)));
    return found;
  }

  function axes(x, y, across, up, toX, toY) {
    pen.globalAlpha = 0.5;
    pen.strokeRect(box.left, box.top, box.right - box.left, box.bottom - box.top);
    pen.globalAlpha = 1;
    pen.textAlign = "center";
    for (const at of ticks(across, box.width / 150)) pen.fillText(at.toLocaleString("en"), toX(at), box.bottom + 16);
    pen.fillText(data.figures[x], (box.left + box.right) / 2, box.height - 10);
    pen.textAlign = "right";
    for (const at of ticks(up, 5)) pen.fillText(at.toLocaleString("en"), box.left - 6, toY(at) + 4);
    pen.save();
    pen.textAlign = "center";
    pen.translate(14, (box.top + box.bottom) / 2);
    pen.rotate(-Math.PI / 2);
    pen.fillText(data.figures[y], 0, 0);
    pen.restore();
  }

  const isSure = (index) => data.margins[index].some((margin) => margin !== null);
  const areSome = data.values.some((_, index) => isSure(index));

  // From a figure's margin below it to as much above.
  function whiskers(point, x, y, toX, toY) {
    const [valueX, valueY] = [data.values[point.index][x], data.values[point.index][y]];
    const [offX, offY] = [data.margins[point.index][x], data.margins[point.index][y]];
    pen.beginPath();
    pen.moveTo(toX(valueX - offX), point.y);
    pen.lineTo(toX(valueX + offX), point.y);
    pen.moveTo(point.x, toY(valueY - offY));
    pen.lineTo(point.x, toY(valueY + offY));
    pen.stroke();
  }

  const sign = (at) => (data.more[at] ? -1 : 1);

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
    fit();
    pen.font = "12px system-ui";
    pen.fillStyle = pen.strokeStyle = ink;
    shown = [];
    if (!indices.length) {
      pen.fillText("no point", box.width / 2, box.height / 2);
      legend([]);
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
      const filled = !areSome || isSure(index);
      pen.fillStyle = pen.strokeStyle = palette[kinds.indexOf(data.choices[index][colour]) % palette.length];
      pen.globalAlpha = filled ? 0.8 : 0.45;
      if (filled && areSome) whiskers(point, x, y, toX, toY);
      pen.beginPath();
      pen.arc(point.x, point.y, index === 0 ? 7 : filled ? 4 : 3, 0, 2 * Math.PI);
      if (filled) pen.fill();
      else pen.stroke();
      shown.push(point);
    }
    pen.globalAlpha = 1;
    pen.strokeStyle = ink;
    frontier(indices.filter((index) => !areSome || isSure(index)), x, y, toX, toY);
    legend(kinds);
  }

  function describe(index) {
    const settings = data.names.map((name, at) => name + " " + data.choices[index][at]);
    const figures = data.figures
      .map((name, at) => [name, data.values[index][at], data.margins[index][at]])
      .filter(([, value]) => value !== null)
      .map(([name, value, off]) => name + " " + Number(value.toPrecision(4)) + (off ? " \u00b1 " + Number(off.toPrecision(2)) : ""));
    return settings.join(", ") + ": " + figures.join(", ");
  }

  canvas.addEventListener("pointermove", (event) => {
    const at = canvas.getBoundingClientRect();
    const x = event.clientX - at.left;
    const y = event.clientY - at.top;
    const far = (point) => (point.x - x) ** 2 + (point.y - y) ** 2;
    const near = shown.reduce((best, point) => (best && far(best) <= far(point) ? best : point), null);
    part("tip").textContent = near && far(near) < 144 ? describe(near.index) : "point at a dot";
  });
  fill(part("across"), data.figures, data.x);
  fill(part("up"), data.figures, data.y);
  fill(part("colour"), data.names, data.names[0]);
  data.names.forEach(addFilter);
  window.addEventListener("resize", draw);
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
