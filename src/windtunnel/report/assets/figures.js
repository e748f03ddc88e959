// Draws the figures of a page with uPlot, from the data beside each. A figure zooms by dragging a box (a double click shows
// everything again), tells values at the pointer, hides a series by a click on its name, and is saved as PNG or CSV.
(() => {
  const COLOURS = [
    "light-dark(#0072b2, #56b4e9)",
    "light-dark(#c44e00, #ff9750)",
    "light-dark(#00805d, #2fc79b)",
    "light-dark(#b0568c, #e79bc6)",
    "light-dark(#8a6d00, #e8c547)",
    "light-dark(#6b4fa0, #b79df0)",
    "light-dark(#4d7a1f, #9fd35f)",
    "light-dark(#666666, #aaaaaa)",
  ];
  const MOST_COLOURS = COLOURS.length;
  const MOST_PANELS = 24;
  const NEAR_PIXELS = 24;
  // Steps between the ticks of counts.
  const WHOLE = Array.from({ length: 10 }, (_, power) => [1, 2, 5].map((by) => by * 10 ** power)).flat();
  const figures = [];

  const make = (name, className, text) => {
    const element = document.createElement(name);
    if (className) element.className = className;
    if (text !== undefined) element.textContent = text;
    return element;
  };
  // Whatever the palette has no colour for is grey, the last one.
  const colourOf = (at) => COLOURS[Math.min(at, MOST_COLOURS - 1)];
  // Numbers in their order; others stay as they came, behind them.
  const inOrder = (values) => {
    const place = (value) => (value === "" || isNaN(value) ? Infinity : Number(value));
    return [...new Set(values)].sort((a, b) => place(a) - place(b) || 0);
  };
  const faded = (colour, alpha) => `rgba(${colour.match(/[\d.]+/g).slice(0, 3).join(", ")}, ${alpha})`;

  // ---- numbers ----
  function unitOf(axis, [low, high]) {
    const most = Math.max(Math.abs(low), Math.abs(high));
    if (axis.unit === "share") return [100, "%"];
    if (axis.unit !== "s") return [1, ""];
    return most >= 1 ? [1, "s"] : most >= 1e-3 ? [1e3, "ms"] : [1e6, "us"];
  }
  // All ticks of an axis have the suffix of the largest.
  function short(value, most = Math.abs(value)) {
    const [size, suffix] = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"], [1, ""]].find(([each]) => most >= each) || [1, ""];
    const scaled = suffix === "k" ? value / 1e3 : value / size;
    return Number(scaled.toPrecision(6)).toLocaleString("en", { maximumSignificantDigits: 6 }) + suffix;
  }
  function shown(value, axis) {
    const [scale, unit] = unitOf(axis, [value, value]);
    return short(Number((value * scale).toPrecision(4))) + (unit === "%" ? unit : unit && " " + unit);
  }

  // ---- data ----
  const isDrawn = (value, axis) => value !== null && value !== undefined && (value > 0 || !axis.isLog);
  function pointsOf(series, x, y) {
    const points = Array.from(series.x, (value, at) => ({ x: value, y: series.y[at], tip: (series.tooltips || [])[at] }));
    return points.filter((point) => isDrawn(point.x, x) && isDrawn(point.y, y)).sort((a, b) => a.x - b.x);
  }
  // One row for each x; further rows where a series has several points there.
  function aligned(all) {
    const entries = all.flatMap((points, at) => points.map((point) => [point.x, at, point.y])).sort((a, b) => a[0] - b[0]);
    const columns = [[], ...all.map(() => [])];
    let row = -1;
    for (const [x, at, y] of entries) {
      if (row < 0 || columns[0][row] !== x || columns[at + 1][row] !== null) {
        row += 1;
        columns[0].push(x);
        for (let other = 1; other < columns.length; other++) columns[other].push(null);
      }
      columns[at + 1][row] = y;
    }
    return columns;
  }
  // The running median or mean, with the 10th and the 90th percentile, of a twelfth of the points around each.
  function smoothed(points, by) {
    const half = Math.max(2, Math.round(points.length / 24));
    return points.map((point, at) => {
      const near = points.slice(Math.max(at - half, 0), at + half + 1).map((one) => one.y).sort((a, b) => a - b);
      const rank = (share) => near[Math.round(share * (near.length - 1))];
      const middle = by === "mean" ? near.reduce((sum, value) => sum + value, 0) / near.length : rank(0.5);
      return { x: point.x, y: middle, low: rank(0.1), high: rank(0.9) };
    });
  }
  function isFarSpread(values) {
    const sorted = values.filter((value) => value > 0).sort((a, b) => a - b);
    return sorted.length > 2 && sorted.length === values.length && sorted.at(-1) > 30 * sorted[sorted.length >> 1];
  }
  function padded(values, axis) {
    let [low, high] = [Infinity, -Infinity];
    for (const value of values) [low, high] = [Math.min(low, value), Math.max(high, value)];
    if (low > high) [low, high] = axis.isLog ? [1, 10] : [0, 1];
    if (axis.isLog) [low, high] = [low / 1.15, high * 1.15];
    else {
      const margin = 0.05 * (high - low || Math.abs(high) || 1);
      // What is never negative is not drawn as if it could be.
      [low, high] = [low >= 0 ? Math.max(low - margin, 0) : low - margin, high + margin];
    }
    return [axis.low ?? low, axis.high ?? high];
  }

  // ---- one plot ----
  // `spec`: axes x and y, series, limits, isEquality; of special figures also overlay (draws over it), describe (the text
  // at a pixel) and full (ranges). Returns the uPlot with `spec`, `table` and `show(series, whether)`.
  function plot(holder, spec, height) {
    const ink = resolved("var(--ink)");
    const grid = resolved("var(--grid)");
    const axes = { x: spec.x, y: spec.y };
    const series = spec.series.map((one) => ({ ...one, points: pointsOf(one, spec.x, spec.y) }));
    const full = spec.full || ranges(spec, series);
    const view = {};
    const [columns, options, bands, owners] = layers(series, spec, ink);
    const axis = (name) => {
      const [scale, unit] = unitOf(axes[name], full[name]);
      return {
        stroke: ink, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1 }, font: "12px system-ui", gap: 4,
        labelFont: "12px system-ui", labelSize: 20, size: name === "x" ? 34 : 52, space: name === "x" ? (holder.clientWidth < 300 ? 36 : 64) : height < 200 ? 24 : 32,
        label: axes[name].label + (unit ? ` (${unit})` : ""),
        values: (_, splits) => splits.map((value) => (value === null ? null : value && short(value * scale, axes[name].isLog ? undefined : Math.max(...splits.map(Math.abs)) * scale))),
        ...(axes[name].unit === "count" && { incrs: WHOLE }),
        ...(axes[name].isLog && { splits: (_u, _at, low, high) => logTicks(low, high), filter: (_, splits) => splits }),
        ...(spec.axis && spec.axis[name]),
      };
    };
    const scale = (name) => ({ time: false, distr: axes[name].isLog ? 3 : 1, dir: spec.tracks && name === "y" ? -1 : 1,
      range: () => view[name] || full[name] });
    const tip = make("div", "tip");
    const u = new uPlot(
      {
        width: Math.max(holder.clientWidth, 240), height, series: [{}, ...options], bands,
        scales: { x: scale("x"), y: scale("y") }, axes: [axis("x"), axis("y")], legend: { show: false },
        cursor: { drag: { x: true, y: !spec.tracks, uni: 24, setScale: false }, points: { size: 6 }, bind: { dblclick: () => null } },
        hooks: {
          draw: [(self) => overlay(self, spec, ink)],
          setSelect: [(self) => {
            const { left, top, width, height: tall } = self.select;
            if (width > 4) view.x = [self.posToVal(left, "x"), self.posToVal(left + width, "x")];
            if (tall > 4 && tall < self.over.clientHeight) {
              view.y = [self.posToVal(top + tall, "y"), self.posToVal(top, "y")];
            }
            self.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
            look();
          }],
          setCursor: [(self) => point(self, tip, spec, series)],
        },
      },
      columns,
      holder,
    );
    u.over.append(tip);
    u.over.addEventListener("dblclick", () => u.zoom(0));
    function look() {
      u.batch(() => {
        for (const name of ["x", "y"]) u.setScale(name, { min: (view[name] || full[name])[0], max: (view[name] || full[name])[1] });
      });
      holder.dispatchEvent(new CustomEvent("zoomed", { bubbles: true, detail: Boolean(view.x || view.y) }));
    }
    // By a factor around the middle; 0 shows everything.
    u.zoom = (factor) => {
      for (const name of spec.tracks ? ["x"] : ["x", "y"]) {
        const to = axes[name].isLog ? Math.log : (value) => value;
        const from = axes[name].isLog ? Math.exp : (value) => value;
        const [low, high] = (view[name] || full[name]).map(to);
        const half = ((high - low) / 2) * factor;
        if (factor) view[name] = [from((low + high) / 2 - half), from((low + high) / 2 + half)];
        else delete view[name];
      }
      look();
    };
    u.show = (at, isShown) => {
      series[at].isHidden = !isShown;
      owners.forEach((owner, layer) => owner === at && u.setSeries(layer + 1, { show: isShown }));
      u.redraw();
    };
    return Object.assign(u, { full });
  }

  // 1, 2 and 5 times powers of ten; over many decades the powers alone, within a narrow range round values.
  function logTicks(low, high) {
    const from = (first, step) => Array.from({ length: Math.floor((high - first) / step) + 1 }, (_, at) => Number((first + at * step).toPrecision(10)));
    const decades = [];
    for (let decade = 10 ** Math.floor(Math.log10(low)); decade <= high; decade *= 10) decades.push(decade);
    const ticks = decades.flatMap((decade) => (high / low < 1e3 ? [1, 2, 5] : [1]).map((by) => Number((by * decade).toPrecision(10))));
    const inside = ticks.filter((tick) => tick >= low && tick <= high);
    if (inside.length > 2) return inside;
    const size = 10 ** Math.floor(Math.log10((high - low) / 4));
    const step = [1, 2, 5, 10].map((by) => by * size).find((each) => each >= (high - low) / 4);
    return from(Math.ceil(low / step) * step, step);
  }
  function ranges(spec, series) {
    const full = {};
    for (const name of ["x", "y"]) {
      const values = series.flatMap((one) => one.points.map((point) => point[name]));
      const most = values.reduce((largest, value) => Math.max(largest, value), 0);
      for (const limit of spec.limits) if (limit.axis === name && limit.value <= 2 * most) values.push(limit.value);
      if (series.some((one) => one.style === "bars") && name === "y") values.push(0);
      full[name] = padded(values, spec[name]);
    }
    if (spec.isEquality) full.x = full.y = [Math.min(full.x[0], full.y[0]), Math.max(full.x[1], full.y[1])];
    return full;
  }

  // The columns and options of uPlot's series, its bands, and for each series the one of the figure that it belongs to.
  function layers(series, spec, ink) {
    const [parts, options, bands, owners] = [[], [], [], []];
    series.forEach((one, at) => {
      const colour = resolved(one.colour || "currentColor");
      const add = (points, option) => {
        parts.push(points);
        owners.push(at);
        options.push({ label: one.label, stroke: colour, width: 1.75, spanGaps: true, points: { show: false }, ...option });
      };
      const isSmooth = spec.smoothedBy && one.style === "line" && one.points.length >= 24;
      const points = isSmooth ? smoothed(one.points, spec.smoothedBy) : one.points;
      if (one.style === "points") {
        const dot = { show: true, size: one.size || 7, stroke: colour, fill: one.isRing ? "transparent" : faded(colour, 0.75) };
        add(points, { paths: () => null, points: dot });
      } else if (one.style === "bars") {
        add(points, { paths: uPlot.paths.bars({ size: [0.92, 200] }), fill: faded(colour, 0.7), width: 0 });
      } else {
        if (isSmooth) {
          for (const end of ["high", "low"]) add(points.map((point) => ({ x: point.x, y: point[end] })), { width: 0, stroke: "transparent" });
          bands.push({ series: [parts.length - 1, parts.length], fill: faded(colour, 0.16) });
        }
        const grey = one.isGrey ? { stroke: faded(ink, 0.18), width: 1 } : {};
        add(points, { ...grey, ...(one.style === "marked" && !one.isGrey ? { points: { show: true, size: 6, fill: colour } } : {}) });
      }
    });
    return [aligned(parts), options, bands, owners];
  }

  function overlay(u, spec, ink) {
    const { ctx, bbox } = u;
    const dots = devicePixelRatio || 1;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    ctx.lineWidth = dots;
    ctx.font = `${12 * dots}px system-ui`;
    const at = (name, value) => u.valToPos(value, name, true);
    const line = (points, dash) => {
      ctx.setLineDash(dash.map((length) => length * dots));
      ctx.beginPath();
      points.forEach(([x, y]) => ctx.lineTo(x, y));
      ctx.stroke();
      ctx.setLineDash([]);
    };
    if (spec.isEquality) {
      ctx.strokeStyle = faded(ink, 0.6);
      const ends = [u.scales.x.min, u.scales.x.max];
      for (const by of [1, 1.2, 1 / 1.2]) line(ends.map((end) => [at("x", end), at("y", end * by)]), by === 1 ? [] : [5, 4]);
    }
    const bad = resolved("var(--bad)");
    for (const limit of spec.limits) {
      ctx.strokeStyle = ctx.fillStyle = limit.label === "capacity" ? ink : bad;
      const isX = limit.axis === "x";
      const scale = u.scales[limit.axis];
      const text = `${limit.label} ${shown(limit.value, spec[limit.axis])}`;
      const isBeyond = limit.value > scale.max;
      const place = at(limit.axis, limit.value);
      const [right, bottom] = [bbox.left + bbox.width, bbox.top + bbox.height];
      if (!isBeyond) line(isX ? [[place, bbox.top], [place, bottom]] : [[bbox.left, place], [right, place]], [6, 4]);
      const wide = ctx.measureText(text).width + 6 * dots;
      ctx.textAlign = "left";
      const beside = place + 5 * dots + wide > right ? place - wide : place + 5 * dots;
      // Latencies rise to the right: what limits them is named on the left.
      const left = isX ? (isBeyond ? right - wide - 20 * dots : beside) : bbox.left + 6 * dots;
      const top = isX && isBeyond ? bottom - 8 * dots : isX || isBeyond ? bbox.top + 14 * dots : Math.max(place - 5 * dots, bbox.top + 12 * dots);
      if (limit.value < scale.min) continue;
      const label = [isBeyond ? `${text} ${isX ? "\u2192" : "\u2191"}` : text, left, top];
      [ctx.strokeStyle, ctx.lineWidth] = [faded(resolved("var(--paper)"), 0.7), 3 * dots]; // data behind the words
      ctx.strokeText(...label);
      ctx.fillText(...label);
      ctx.lineWidth = dots;
    }
    if (spec.overlay) spec.overlay(u, ctx, at, line, dots, ink);
    ctx.restore();
  }

  // ---- the pointer ----
  function nearest(u, series, points) {
    let [best, least] = [null, NEAR_PIXELS ** 2];
    for (const point of points) {
      const far = (u.valToPos(point.x, "x") - u.cursor.left) ** 2 + (u.valToPos(point.y, "y") - u.cursor.top) ** 2;
      if (far < least) [best, least] = [{ ...point, series }, far];
    }
    return best && { ...best, far: least };
  }
  function closest(points, x) {
    let [low, high] = [0, points.length - 1];
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (points[middle].x <= x) low = middle;
      else high = middle;
    }
    return points.length && (x - points[low].x <= points[high].x - x ? points[low] : points[high]);
  }
  function texts(u, spec, series) {
    if (spec.describe) return spec.describe(u);
    const visible = series.filter((one) => !one.isHidden && !one.isGrey && one.points.length);
    if (visible.some((one) => one.style === "points")) {
      const found = visible.map((one) => nearest(u, one, one.points)).filter(Boolean).sort((a, b) => a.far - b.far)[0];
      if (!found) return [];
      const text = found.tip || `${spec.x.label} ${shown(found.x, spec.x)}, ${spec.y.label} ${shown(found.y, spec.y)}`;
      return [{ text, colour: found.series.colour }];
    }
    const x = u.posToVal(u.cursor.left, "x");
    const rows = visible.map((one) => ({ one, point: closest(one.points, x) })).filter(({ point }) => Math.abs(u.valToPos(point.x, "x") - u.cursor.left) < 60);
    if (!rows.length) return [];
    const head = { text: `${spec.x.label} ${shown(rows[0].point.x, spec.x)}` };
    return [head, ...rows.map(({ one, point }) => ({ text: `${one.label} ${shown(point.y, spec.y)}`, colour: one.colour }))];
  }
  function point(u, tip, spec, series) {
    const lines = u.cursor.left >= 0 ? texts(u, spec, series) : [];
    tip.hidden = !lines.length;
    tip.replaceChildren(
      ...lines.map(({ text, colour }) => {
        const row = make("div", "", text);
        if (colour) row.prepend(swatch(colour));
        return row;
      }),
    );
    const isLeft = u.cursor.left > u.over.clientWidth / 2;
    tip.style.left = isLeft ? "" : u.cursor.left + 12 + "px";
    tip.style.right = isLeft ? u.over.clientWidth - u.cursor.left + 12 + "px" : "";
    tip.style.top = Math.max(0, Math.min(u.cursor.top, u.over.clientHeight - tip.offsetHeight)) + "px";
  }
  function swatch(colour) {
    const mark = make("i", "swatch");
    mark.style.background = colour;
    return mark;
  }

  // ---- a whole figure ----
  function draw(root) {
    const data = JSON.parse(root.querySelector("script").textContent);
    const caption = root.closest("figure")?.querySelector("figcaption")?.textContent || data.title || "figure";
    const parts = { legend: make("div", "legend"), plot: make("div", "plots"), tools: make("div", "tools") };
    root.append(parts.legend, parts.plot);
    root.before(parts.tools);
    const figure = { root, data, caption, plots: [], ...parts, isRaw: false };
    parts.plot.setAttribute("role", "img");
    parts.plot.setAttribute("aria-label", caption);
    const button = (text, label, act) => toolButton(parts.tools, caption, text, label, act);
    const reset = button("reset", "show everything", () => figure.plots.forEach((u) => u.zoom(0)));
    reset.hidden = true;
    root.addEventListener("zoomed", (event) => (reset.hidden = !event.detail));
    button("zoom", "zoom in", () => figure.plots.forEach((u) => u.zoom(0.5)));
    if (data.smoothed_by) {
      const raw = button("raw", "every value", () => {
        figure.isRaw = !figure.isRaw;
        raw.setAttribute("aria-pressed", figure.isRaw);
        redraw(figure);
      });
      raw.setAttribute("aria-pressed", "false");
    }
    button("PNG", "save as PNG", () => savePng(figure));
    button("CSV", "save as CSV", () => saveCsv(rowsOf(figure), caption));
    if (data.names) addControls(figure);
    redraw(figure);
    figure.width = root.clientWidth;
    new ResizeObserver(() => {
      if (root.clientWidth && root.clientWidth !== figure.width) {
        figure.width = root.clientWidth;
        redraw(figure);
      }
    }).observe(root);
    figures.push(figure);
  }

  function redraw(figure) {
    figure.plots.forEach((u) => u.destroy());
    figure.plot.replaceChildren();
    const { data } = figure;
    const spec = data.names ? searchSpec(figure) : data.tracks.length ? trackSpec(data) : chartSpec(figure);
    figure.spec = spec;
    const isMany = spec.series.length > MOST_COLOURS && spec.series.every((one) => one.style !== "points");
    figure.plots = isMany ? panels(figure, spec) : [plot(figure.plot, spec, spec.height || 250)];
    figure.legend.replaceChildren(...(isMany ? [] : legend(figure, spec)));
  }
  function chartSpec({ data, isRaw }) {
    const axisOf = (name) => {
      const values = data.series.flatMap((one) => one[name]).filter((value) => value !== null);
      // Chosen values of a setting have no median that matters.
      const isSetting = data.series.every((one) => one.style === "marked");
      return { ...data[name], isLog: data[name].is_log ?? (isSetting ? Math.max(...values) > 30 * Math.min(...values) && Math.min(...values) > 0 : isFarSpread(values)) };
    };
    const series = data.series.map((one, at) => ({ ...one, colour: colourOf(at) }));
    const height = data.is_equality ? 360 : 250;
    return { x: axisOf("x"), y: axisOf("y"), series, limits: data.limits, smoothedBy: isRaw ? "" : data.smoothed_by, isEquality: data.is_equality, height };
  }
  // A panel for each series over all others in grey.
  function panels(figure, spec) {
    const full = ranges(spec, spec.series.map((one) => ({ ...one, points: pointsOf(one, spec.x, spec.y) })));
    figure.plot.classList.add("panels");
    figure.root.closest("figure")?.classList.add("whole");
    return spec.series.slice(0, MOST_PANELS).map((one, at) => {
      const cell = figure.plot.appendChild(make("div"));
      cell.append(make("p", "panel", one.label));
      const others = spec.series.filter((_, other) => other !== at).map((other) => ({ ...other, isGrey: true }));
      return plot(cell, { ...spec, full, series: [...others, { ...one, colour: COLOURS[0] }] }, 170);
    });
  }
  function legend(figure, spec) {
    const most = MOST_COLOURS - 1;
    const showing = (first, end) => (is) => spec.series.slice(first, end).forEach((_, at) => figure.plots[0].show(first + at, is));
    const all = spec.series.map((one, at) => ({ label: one.label, colour: one.colour, show: showing(at, at + 1) }));
    // What there is no colour for is named together.
    const others = { label: `${all.length - most} others`, colour: colourOf(most), show: showing(most) };
    const entries = spec.legend || (all.length > MOST_COLOURS ? [...all.slice(0, most), others] : all);
    return (entries.length > 1 ? entries : []).filter((entry) => entry.label).map((entry) => {
      const toggle = make("button", "", entry.label);
      toggle.type = "button";
      toggle.prepend(swatch(entry.colour));
      toggle.setAttribute("aria-pressed", "true");
      toggle.addEventListener("click", () => {
        const isShown = toggle.getAttribute("aria-pressed") !== "true";
        toggle.setAttribute("aria-pressed", isShown);
        entry.show(isShown);
      });
      return toggle;
    });
  }

  // ---- tracks ----
  function trackSpec(data) {
    const kinds = [...new Set(data.bars.map((bar) => bar.kind))];
    const hidden = new Set();
    const visible = () => data.bars.filter((bar) => !hidden.has(bar.kind));
    const full = { x: padded(data.bars.flatMap((bar) => [bar.begin, bar.end]), { low: data.x.low, high: data.x.high }), y: [0, data.tracks.length] };
    const every = Math.ceil(14 / (480 / data.tracks.length)) || 1;
    const colours = kinds.map((_, at) => colourOf(at));
    return {
      x: { ...data.x, isLog: false }, y: { label: "", unit: "", isLog: false }, limits: [], tracks: data.tracks, full,
      series: [{ label: "", x: full.x, y: full.y, style: "line", colour: "transparent" }],
      height: Math.min(70 + 26 * data.tracks.length, 560),
      axis: { y: { label: "", size: 76, splits: () => data.tracks.map((_, at) => at + 0.5).filter((_, at) => at % every === 0),
        values: (_, splits) => splits.map((place) => data.tracks[Math.floor(place)]), grid: { show: false } } },
      legend: kinds.map((label, at) => ({ label, colour: colours[at], show: (is) => {
        if (is) hidden.delete(label);
        else hidden.add(label);
        figures.forEach((figure) => figure.data === data && figure.plots[0].redraw());
      } })),
      overlay: (u, ctx, at, line, dots) => {
        const fills = colours.map(resolved);
        for (const bar of visible()) {
          const [left, right, top] = [at("x", bar.begin), at("x", bar.end), at("y", bar.track)];
          const gap = right - left > 4 * dots ? dots : 0;
          ctx.fillStyle = fills[kinds.indexOf(bar.kind)];
          ctx.fillRect(left, top + dots, Math.max(right - left - gap, dots / 2), at("y", bar.track + 1) - top - 2 * dots);
        }
      },
      describe: (u) => {
        const [time, track] = [u.posToVal(u.cursor.left, "x"), Math.floor(u.posToVal(u.cursor.top, "y"))];
        const bar = visible().find((one) => one.track === track && one.begin <= time && time < one.end);
        if (!bar) return [];
        return [{ text: `${data.tracks[track]}, ${bar.kind}${bar.title ? ` of ${bar.title}` : ""}: ${shown(bar.end - bar.begin, data.x)}`, colour: colours[kinds.indexOf(bar.kind)] }];
      },
    };
  }

  // ---- the points of a search, whose axes, colours and filters the reader chooses ----
  // `data`: figures (what values are called) with units, more (whether more of a figure is better), names (of settings),
  // choices, values and margins (of each point; null where it met one stream of requests alone), x, y, and the best point.
  function addControls(figure) {
    const { data, root } = figure;
    const box = make("div", "controls");
    const add = (label, names, chosen) => {
      const [field, select] = [make("label", "", label + " "), make("select")];
      for (const name of names) select.append(new Option(name, name, false, name === chosen));
      select.addEventListener("change", () => redraw(figure));
      field.append(select);
      box.append(field, " ");
      return select;
    };
    const values = data.names.map((_, at) => inOrder(data.choices.map((choice) => choice[at])));
    const told = data.names.find((_, at) => values[at].length > 1 && values[at].length <= MOST_COLOURS);
    figure.chosen = { x: add("across", data.figures, data.x), y: add("up", data.figures, data.y), colour: add("colour", data.names, told || data.names[0]) };
    figure.filters = data.names.map((name, at) => add(name, ["any", ...values[at]], "any"));
    root.insertBefore(box, figure.legend);
  }
  function searchSpec({ data, chosen, filters }) {
    const [x, y] = [data.figures.indexOf(chosen.x.value), data.figures.indexOf(chosen.y.value)];
    const colour = data.names.indexOf(chosen.colour.value);
    const fits = (index) => filters.every((one, at) => one.value === "any" || data.choices[index][at] === one.value);
    const kept = data.values.map((_, index) => index).filter((index) => data.values[index][x] !== null && data.values[index][y] !== null && fits(index));
    const isSure = (index) => data.margins[index].some((margin) => margin !== null);
    const areSome = data.values.some((_, index) => isSure(index));
    // The best points come first; what there is no colour for is named together.
    const all = [...new Set(data.choices.map((choice) => choice[colour]))];
    const named = new Set(all.length > MOST_COLOURS ? all.slice(0, MOST_COLOURS - 1) : all);
    const kindOf = (index) => (named.has(data.choices[index][colour]) ? data.choices[index][colour] : `${all.length - named.size} others`);
    const kinds = inOrder(data.choices.map((_, index) => kindOf(index)));
    const colours = kinds.map((_, at) => colourOf(at));
    const series = kinds.flatMap((kind, at) =>
      [true, false].map((sure) => {
        const mine = kept.filter((index) => kindOf(index) === kind && (isSure(index) || !areSome) === sure);
        return { label: kind, style: "points", colour: colours[at], isRing: !sure, size: sure ? 8 : 6,
          x: mine.map((index) => data.values[index][x]), y: mine.map((index) => data.values[index][y]), tooltips: mine.map((index) => describe(data, index)) };
      }),
    );
    const axis = (at) => ({ label: data.figures[at], unit: data.units[at], isLog: false });
    const limits = [["x", x], ["y", y]].map(([name, at]) => ({ axis: name, value: data.limits[data.figures[at]], label: "limit" })).filter((limit) => limit.value);
    const spec = { x: axis(x), y: axis(y), series, limits, height: 380 };
    const reach = (at) => [data.limits[data.figures[at]] || [], kept.map((index) => [-1, 1].map((sign) => data.values[index][at] + sign * (data.margins[index][at] || 0)))].flat(2);
    spec.full = { x: padded(reach(x), spec.x), y: padded(reach(y), spec.y) };
    spec.legend = kinds.map((label, at) => ({ label, colour: colours[at], show: (is) => {
      const u = figures.find((figure) => figure.data === data).plots[0];
      [2 * at, 2 * at + 1].forEach((one) => u.show(one, is));
    } }));
    spec.overlay = (u, ctx, at, line, dots, ink) => {
      for (const index of kept.filter((one) => areSome && isSure(one))) {
        const [valueX, valueY, offX, offY] = [data.values[index][x], data.values[index][y], data.margins[index][x] || 0, data.margins[index][y] || 0];
        ctx.strokeStyle = faded(resolved(colours[kinds.indexOf(kindOf(index))]), 0.7);
        line([[at("x", valueX - offX), at("y", valueY)], [at("x", valueX + offX), at("y", valueY)]], []);
        line([[at("x", valueX), at("y", valueY - offY)], [at("x", valueX), at("y", valueY + offY)]], []);
      }
      ctx.strokeStyle = ink;
      line(frontier(data, kept.filter((index) => !areSome || isSure(index)), x, y).map((index) => [at("x", data.values[index][x]), at("y", data.values[index][y])]), [5, 4]);
      const best = data.values[data.best];
      if (!kept.includes(data.best)) return;
      ctx.lineWidth = 2 * dots;
      ctx.beginPath();
      ctx.arc(at("x", best[x]), at("y", best[y]), 8 * dots, 0, 2 * Math.PI);
      ctx.stroke();
      ctx.fillStyle = ink;
      const isLeft = at("x", best[x]) > u.bbox.left + u.bbox.width / 2;
      ctx.textAlign = isLeft ? "right" : "left";
      const label = ["best", at("x", best[x]) + (isLeft ? -13 : 13) * dots, at("y", best[y]) + 4 * dots];
      [ctx.strokeStyle, ctx.lineWidth] = [faded(resolved("var(--paper)"), 0.7), 3 * dots];
      ctx.strokeText(...label);
      ctx.fillText(...label);
    };
    return spec;
  }
  function frontier(data, indices, x, y) {
    const value = (index, at) => (data.more[at] ? -1 : 1) * data.values[index][at];
    let best = Infinity;
    return [...indices].sort((a, b) => value(a, x) - value(b, x) || value(a, y) - value(b, y)).filter((index) => {
      if (value(index, y) >= best) return false;
      best = value(index, y);
      return true;
    });
  }
  function describe(data, index) {
    const settings = data.names.map((name, at) => `${name} ${data.choices[index][at]}`);
    const values = data.figures
      .map((name, at) => [name, data.values[index][at], data.margins[index][at], { unit: data.units[at] }])
      .filter(([, value]) => value !== null)
      .map(([name, value, off, axis]) => `${name} ${shown(value, axis)}${off ? ` \u00b1 ${shown(off, axis)}` : ""}`);
    return `${settings.join(", ")}: ${values.join(", ")}`;
  }

  // ---- files ----
  function rowsOf({ data, spec }) {
    if (data.names) return [[...data.names, ...data.figures], ...data.choices.map((choice, at) => [...choice, ...data.values[at]])];
    if (data.tracks.length) {
      return [["track", "begin", "end", "kind", "title"], ...data.bars.map((bar) => [data.tracks[bar.track], bar.begin, bar.end, bar.kind, bar.title])];
    }
    const columns = aligned(data.series.map((one) => pointsOf(one, { isLog: false }, { isLog: false })));
    const unit = (axis) => axis.label + (axis.unit === "s" ? " (s)" : "");
    return [[unit(spec.x), ...data.series.map((one) => one.label || unit(spec.y))], ...columns[0].map((_, row) => columns.map((column) => column[row]))];
  }
  function savePng(figure) {
    const place = figure.plot.getBoundingClientRect();
    const names = [...figure.legend.querySelectorAll("[aria-pressed=true]")].map((entry) => [entry.textContent, getComputedStyle(entry.firstChild).backgroundColor]);
    const pen = captionedCanvas(place.width, place.height + 56, figure.caption);
    let left = 8;
    for (const [name, colour] of names) {
      pen.fillStyle = colour;
      pen.fillRect(left, 34, 10, 10);
      pen.fillStyle = resolved("var(--ink)");
      pen.fillText(name, left + 15, 43);
      left += pen.measureText(name).width + 30;
    }
    for (const u of figure.plots) {
      const at = u.ctx.canvas.getBoundingClientRect();
      pen.drawImage(u.ctx.canvas, at.left - place.left, at.top - place.top + 56, at.width, at.height);
    }
    savePicture(pen, figure.caption);
  }

  // ---- when ----
  function drawAll() {
    for (let at = figures.length - 1; at >= 0; at--) if (!figures[at].root.isConnected) figures.splice(at, 1);
    for (const root of document.querySelectorAll(".chart")) if (!root.querySelector(".plots")) draw(root);
  }
  const redrawAll = () => figures.forEach(redraw);
  // Paper is light, and has a width of its own.
  for (const query of ["(prefers-color-scheme: dark)", "print"]) matchMedia(query).addEventListener("change", redrawAll);
  document.addEventListener("theme-changed", redrawAll);
  // The dashboard shows new figures in place.
  document.addEventListener("main-shown", drawAll);
  drawAll();
})();
