// The form of a scenario: what changes is simulated at once, the slider moves the load, and saving says what it wrote.
(() => {
  const form = document.getElementById("trial");
  const result = document.getElementById("result");
  const slider = document.getElementById("slider");
  const WAIT_MS = 250;
  let timer = null;
  let running = false;
  let next = null; // what to ask for when the present answer is there

  function fields(extra) {
    const data = new URLSearchParams(new FormData(form));
    for (const [name, value] of Object.entries(extra || {})) data.set(name, value);
    return data;
  }

  // Loads one page at a time; of changes meanwhile only the last is sent.
  async function ask(address, extra) {
    if (running) {
      next = [address, extra];
      return;
    }
    running = true;
    result.setAttribute("aria-busy", "true");
    const began = performance.now();
    try {
      const response = await fetch(address, { method: "POST", body: fields(extra) });
      const page = new DOMParser().parseFromString(await response.text(), "text/html");
      result.replaceChildren(...page.querySelector("main").childNodes);
      const took = document.createElement("p");
      took.className = "lead";
      took.textContent = `answered in ${((performance.now() - began) / 1000).toFixed(2)} s`;
      result.append(took);
      // The answer leads the page, also where the form comes before the result.
      document.getElementById("answer").replaceChildren(...result.querySelectorAll(".verdict"));
      document.dispatchEvent(new Event("main-shown"));
    } catch {
      result.textContent = "the dashboard does not answer: has it ended?";
    }
    running = false;
    result.removeAttribute("aria-busy");
    if (next) {
      const [waiting, more] = next;
      next = null;
      ask(waiting, more);
    }
  }

  function keepAddress() {
    const data = fields();
    for (const [name, value] of [...data]) if (!value || name === "name") data.delete(name);
    if ((data.get("text") || "").length < 1500) history.replaceState(null, "", "/try?" + data);
  }

  function changed() {
    clearTimeout(timer);
    timer = setTimeout(() => {
      keepAddress();
      ask("/trial");
    }, WAIT_MS);
  }

  function showSlider() {
    const load = Number(form.elements.load.value);
    if (load > 0) slider.value = Math.log10(load);
  }

  slider.addEventListener("input", () => {
    const load = 10 ** slider.value;
    const isRate = form.elements.arrivals.value !== "concurrency";
    if (!form.elements.arrivals.value) form.elements.arrivals.value = "rate";
    form.elements.load.value = isRate ? Number(load.toPrecision(3)) : Math.max(1, Math.round(load));
    changed();
  });
  form.addEventListener("input", (event) => {
    if (event.target === slider || event.target.name === "name") return;
    if (event.target.name === "load") showSlider();
    changed();
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    clearTimeout(timer);
    const button = event.submitter;
    const address = (button && button.getAttribute("formaction")) || "/trial";
    ask(address, button && button.name ? { [button.name]: button.value } : {});
  });
  showSlider();
  ask("/trial");
})();
