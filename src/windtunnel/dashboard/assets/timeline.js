// Steps of every replica as tracks over time. The data of an interval is loaded when it is shown.
(() => {
  const canvas = document.getElementById("timeline");
  const pen = canvas.getContext("2d");
  const TRACK = 26;
  let LEFT = 150;
  const AXIS = 24;
  let whole = null; // [first, last] second of the run
  let view = null; // [from, to] that is looked at
  let data = null;
  let asking = 0;
  let timer = null;

  const width = () => canvas.clientWidth - LEFT - 8;
  const toX = (time) => LEFT + ((time - view[0]) / (view[1] - view[0])) * width();
  const toTime = (x) => view[0] + ((x - LEFT) / width()) * (view[1] - view[0]);

  function seconds(value, span) {
    const digits = Math.max(0, Math.min(6, Math.ceil(-Math.log10(span / 1000))));
    return value.toFixed(digits) + " s";
  }

  function ticks() {
    const raw = (view[1] - view[0]) / Math.max(2, width() / 110);
    const size = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((factor) => factor * size).find((one) => one >= raw);
    const found = [];
    for (let time = Math.ceil(view[0] / step) * step; time <= view[1]; time += step) found.push(time);
    return found;
  }

  function draw() {
    const ratio = devicePixelRatio || 1;
    LEFT = canvas.clientWidth < 600 ? 72 : 150;
    const height = AXIS + TRACK * data.tracks.length + 4;
    canvas.style.height = height + "px";
    canvas.width = canvas.clientWidth * ratio;
    canvas.height = height * ratio;
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, canvas.clientWidth, height);
    pen.font = "11px system-ui";
    const ink = getComputedStyle(document.body).color;
    pen.fillStyle = ink;
    pen.textAlign = "center";
    for (const time of ticks()) {
      pen.globalAlpha = 0.15;
      pen.fillRect(toX(time), AXIS - 4, 1, height);
      pen.globalAlpha = 1;
      const text = seconds(time, view[1] - view[0]);
      pen.fillText(text, Math.min(toX(time), canvas.clientWidth - pen.measureText(text).width / 2), 14);
    }
    data.tracks.forEach((track, at) => {
      const bottom = AXIS + TRACK * (at + 1);
      pen.fillStyle = ink;
      pen.textAlign = "left";
      pen.fillText(track.name, 2, bottom - 9, LEFT - 8);
      for (const [start, end, busy, prefill, steps] of track.slices) {
        // Whole pixels: neighbours would show a seam.
        const left = Math.max(Math.floor(toX(start)), LEFT);
        const right = Math.min(Math.ceil(toX(end)), LEFT + width());
        if (right <= left) continue;
        const gap = track.is_merged || right - left < 4 ? 0 : 1;
        const tall = Math.max(busy * (TRACK - 5), 1);
        // Steps that only decode in blue, those that compute prompts in orange, by their share of the time.
        pen.fillStyle = "#0072b2";
        pen.fillRect(left, bottom - tall, right - left - gap, tall * (1 - prefill));
        pen.fillStyle = "#d55e00";
        pen.fillRect(left, bottom - tall * prefill, right - left - gap, tall * prefill);
        if (!track.is_merged) divide(start, end, steps, bottom - tall, tall);
      }
      pen.fillStyle = ink;
      pen.globalAlpha = 0.2;
      pen.fillRect(LEFT, bottom, width(), 1);
      pen.globalAlpha = 1;
    });
    const more = data.num_tracks > data.tracks.length ? `; the first ${data.tracks.length} of ${data.num_tracks} tracks` : "";
    const span = view[1] - view[0];
    document.getElementById("stretch").textContent = `${seconds(view[0], span)} to ${seconds(view[1], span)}${more}`;
  }

  // Lines between the equal steps of one bar, where there is room for them.
  function divide(start, end, steps, top, tall) {
    const each = (end - start) / steps;
    if (steps < 2 || (each / (view[1] - view[0])) * width() < 5) return;
    pen.fillStyle = "Canvas";
    const first = Math.max(1, Math.ceil((view[0] - start) / each));
    for (let step = first; step < steps && start + step * each < view[1]; step++) {
      pen.fillRect(Math.round(toX(start + step * each)), top, 1, tall);
    }
  }

  async function ask() {
    const number = ++asking;
    const stretch = view ? `?from=${view[0]}&to=${view[1]}` : "";
    const response = await fetch(canvas.dataset.name + stretch);
    const found = await response.json();
    if (number !== asking) return;
    if (!response.ok) {
      document.getElementById("slice").textContent = found.error;
      return;
    }
    data = found;
    whole = [found.first_s, Math.max(found.last_s, found.first_s + 1e-6)];
    view = view || [...whole];
    draw();
  }

  function look(from, to) {
    const span = Math.min(Math.max(to - from, 1e-4), whole[1] - whole[0]);
    from = Math.min(Math.max(from, whole[0]), whole[1] - span);
    view = [from, from + span];
    draw();
    clearTimeout(timer);
    timer = setTimeout(ask, 120);
  }

  function zoom(factor, at = (view[0] + view[1]) / 2) {
    look(at - (at - view[0]) * factor, at + (view[1] - at) * factor);
  }

  function move(share) {
    const step = share * (view[1] - view[0]);
    look(view[0] + step, view[1] + step);
  }

  const actions = {
    in: () => zoom(0.5),
    out: () => zoom(2),
    left: () => move(-0.5),
    right: () => move(0.5),
    all: () => look(...whole),
  };
  const keys = { "+": "in", "=": "in", "-": "out", ArrowLeft: "left", ArrowRight: "right", 0: "all" };
  for (const button of document.querySelectorAll("[data-zoom]")) {
    button.addEventListener("click", () => view && actions[button.dataset.zoom]());
  }
  canvas.addEventListener("keydown", (event) => {
    if (!view || !keys[event.key]) return;
    event.preventDefault();
    actions[keys[event.key]]();
  });
  canvas.addEventListener(
    "wheel",
    (event) => {
      if (!view) return;
      event.preventDefault();
      if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) move(event.deltaX / width());
      else zoom(1.0015 ** event.deltaY, toTime(event.offsetX));
    },
    { passive: false },
  );

  let dragged = null;
  canvas.addEventListener("pointerdown", (event) => {
    dragged = view && [event.offsetX, ...view];
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointerup", () => (dragged = null));
  canvas.addEventListener("pointermove", (event) => {
    if (!view) return;
    if (dragged) {
      const moved = ((event.offsetX - dragged[0]) / width()) * (dragged[2] - dragged[1]);
      look(dragged[1] - moved, dragged[2] - moved);
    } else describe(event.offsetX, event.offsetY);
  });

  function describe(x, y) {
    const track = data.tracks[Math.floor((y - AXIS) / TRACK)];
    const time = toTime(x);
    const slice = track && track.slices.find(([start, end]) => start <= time && time < end);
    if (!slice) return;
    const [start, end, busy, , steps, decode, prefill, running, waiting, blocks] = slice;
    const each = (((end - start) * busy) / Math.max(steps, 1e-9)) * 1e3;
    const counts = track.is_merged
      ? `about ${steps.toFixed(1)} steps of ${each.toPrecision(3)} ms, busy ${(busy * 100).toFixed(1)}%`
      : `${steps > 1 ? `${steps} equal steps of ` : "a step of "}${each.toPrecision(3)} ms`;
    document.getElementById("slice").textContent =
      `${track.name}, ${seconds(start, view[1] - view[0])}: ${counts}; ${round(decode)} decode and ${round(prefill)} ` +
      `prompt tokens; ${round(running)} running, ${round(waiting)} waiting; ${round(blocks)} KV blocks`;
  }

  const round = (value) => (Number.isInteger(value) ? value.toLocaleString("en") : value.toFixed(1));

  addEventListener("resize", () => data && draw());
  document.getElementById("theme").addEventListener("click", () => data && draw());
  ask();
})();
