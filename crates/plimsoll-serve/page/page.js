"use strict";
// Shows each snapshot that the server sends. Text from a snapshot only ever becomes text, never markup.

const byId = (id) => document.getElementById(id);
const isKnown = (value) => value !== null && value !== undefined;

// ---- Formats: the same digits as the terminal view.

const BYTE_UNITS = [["TiB", 40], ["GiB", 30], ["MiB", 20], ["KiB", 10]];
const COUNT_UNITS = [["B", 1e9], ["M", 1e6], ["k", 1e3]];

function bytes(number) {
  for (const [unit, bits] of BYTE_UNITS) {
    if (number >= 2 ** bits) return `${(number / 2 ** bits).toFixed(2)} ${unit}`;
  }
  return `${number} B`;
}

function count(number) {
  for (const [unit, scale] of COUNT_UNITS) {
    const scaled = number / scale;
    if (scaled >= 1) return `${scaled.toFixed(scaled < 10 ? 2 : 1)} ${unit}`;
  }
  return number.toFixed(0);
}

const percent = (share) => `${(share * 100).toFixed(0)} %`;
const rate = (number) => number.toExponential(1).replace("e+", "e");

function clock(seconds) {
  const whole = Math.round(seconds);
  const hours = Math.floor(whole / 3600);
  const [minutes, rest] = [Math.floor(whole / 60) % 60, String(whole % 60).padStart(2, "0")];
  if (hours >= 48) return `${Math.floor((hours + 12) / 24)} days`;
  return hours ? `${hours}:${String(minutes).padStart(2, "0")}:${rest}` : `${minutes}:${rest}`;
}

const timeOfDay = (seconds) => new Date(seconds * 1000).toLocaleTimeString();

// ---- Elements.

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function shape(tag, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

// Replaces text only if it differs, so that screen readers and selections are left alone.
function setText(target, text) {
  if (target.textContent !== text) target.textContent = text;
}

// Replaces the children of an element, unless their text is as before.
function setList(target, children) {
  const text = children.map((child) => child.textContent).join("\n");
  if (target.dataset.text === text) return;
  target.dataset.text = text;
  target.replaceChildren(...children);
}

// Shows name and value of each figure that is known.
function setFigures(list, figures) {
  const known = figures.filter(([, value]) => isKnown(value));
  setList(list, known.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))));
}

const shown = (value, format) => (isKnown(value) ? format(value) : null);

// ---- The run and the machine.

const STATES = { starting: "starting", running: "running", done: "done", stopped: "stopped", died: "ended without a result" };

function showRun(run) {
  for (const id of ["run", "plots-section", "feed-section", "state"]) byId(id).hidden = !run;
  byId("simulated").hidden = !run?.simulated;
  setText(byId("title"), run ? run.folder : "Devices of this machine");
  document.title = run ? `${run.step}${run.steps ? `/${run.steps}` : ""} ${run.folder}` : "Plimsoll";
  if (!run) return;
  setText(byId("state"), STATES[run.state] ?? run.state);
  const progress = byId("progress");
  progress.hidden = !run.steps;
  if (run.steps) [progress.max, progress.value] = [run.steps, Math.min(run.step, run.steps)];
  setFigures(byId("figures"), [
    ["step", run.steps ? `${run.step} of ${run.steps}` : String(run.step)],
    ["loss", shown(run.loss, (loss) => loss.toFixed(4))],
    ["evaluation loss", shown(run.eval_loss, (loss) => loss.toFixed(4))],
    ["gradient norm", shown(run.gradient_norm, (norm) => norm.toFixed(2))],
    ["learning rate", shown(run.learning_rate, rate)],
    ["tokens/s", shown(run.tokens_per_second, count)],
    ["share of peak rate", shown(run.peak_share, percent)],
    ["seconds per step", shown(run.step_seconds, (seconds) => seconds.toPrecision(3))],
    ["predicted per step", shown(run.predicted_step_seconds, (seconds) => seconds.toPrecision(3))],
    ["time left", shown(run.eta_seconds, clock)],
    ["newest checkpoint", shown(run.checkpoint_step, (step) => `step ${step}`)],
  ]);
}

function showPlan(plan) {
  byId("plan").hidden = !plan;
  if (!plan) return;
  setFigures(byId("plan-figures"), [
    ["parallelism", plan.parallelism],
    ["predicted tokens/s", count(plan.predicted_tokens_per_second)],
    ["effect on the results", plan.effect],
  ]);
  const work = ({ device, sequences, layers, recipe }) => {
    const parts = [shown(sequences || null, (number) => `${number} sequence${number === 1 ? "" : "s"}`), shown(layers, ([first, end]) => `layers ${first} to ${end - 1}`), recipe];
    return `${device}: ${parts.filter(isKnown).join(", ")}`;
  };
  const lines = [...plan.workers.map(work), ...plan.excluded.map((excluded) => `excluded: ${excluded}`)];
  setList(byId("workers"), lines.map((line) => element("li", {}, line)));
}

function showMachine({ host, cpu }) {
  const offload = isKnown(host.arena_bytes) && isKnown(host.load_line_bytes);
  setFigures(byId("machine"), [
    ["processor busy", isKnown(cpu.load) ? percent(cpu.load) : "?"],
    ["free memory", shown(host.free_bytes, bytes)],
    ["memory", shown(host.total_bytes, bytes)],
    ["planned offload", offload ? `${bytes(host.arena_bytes)} of ${bytes(host.load_line_bytes)}` : null],
  ]);
}

function showWarnings(warnings) {
  byId("warnings").hidden = warnings.length === 0;
  setList(byId("warnings").firstElementChild, warnings.map((warning) => element("li", {}, warning)));
}

function showRecommendations(recommendations) {
  byId("recommendations").hidden = recommendations.length === 0;
  const item = ({ text, command }) => element("li", {}, element("p", {}, text), element("code", {}, command));
  setList(byId("recommendations").querySelector("ul"), recommendations.map(item));
}

function showFeed(feed) {
  const line = ({ time, text }) => element("li", {}, element("time", {}, timeOfDay(time)), text);
  setList(byId("feed"), feed.toReversed().map(line));
}

// ---- Devices.

const LETTERS = {
  weight: "w", gradient: "g", optimizer: "o", activation: "a", workspace: "k", communication: "m", staging: "s",
  charges: "c", others: "x",
};
const NAMES = { others: "other processes" };
// Part of the bar to the left of the load line, and most times that a device may exceed its line for the bar to show all
// of it: as in the terminal view.
const LINE_AT = 0.92;
const MAX_TIMES_LINE = 4;

const showsAll = (device) =>
  isKnown(device.total_bytes) && (!isKnown(device.load_line_bytes) || device.total_bytes <= MAX_TIMES_LINE * device.load_line_bytes);

// Returns name and bytes of each part of a device's memory in the order of the bar.
function parts(device) {
  const all = Object.entries(device.by_category);
  all.push(["charges", device.charges_bytes]);
  if (showsAll(device)) all.push(["others", device.others_bytes]);
  return all.filter(([, size]) => size > 0);
}

// Returns the bytes at the right end of the bar; 0 for a device of which no bytes are known.
function scale(device) {
  if (showsAll(device)) return device.total_bytes;
  if (!isKnown(device.load_line_bytes)) return 0;
  return Math.max(device.load_line_bytes / LINE_AT, device.measured_peak_bytes ?? 0, device.predicted_peak_bytes ?? 0);
}

function bar(device) {
  const most = scale(device);
  const made = element("div", { class: "bar", role: "img", "aria-label": barText(device) });
  const at = (size) => `${Math.min(100, (100 * size) / most)}%`;
  let below = 0;
  for (const [name, size] of parts(device)) {
    const part = element("div", { class: `part ${name}`, title: `${NAMES[name] ?? name} ${bytes(size)}` }, LETTERS[name]);
    part.style.left = at(below);
    part.style.width = `calc(${at(below + size)} - ${at(below)})`;
    below += size;
    made.append(part);
  }
  const marks = { planned: ["predicted_peak_bytes", "planned peak"], measured: ["measured_peak_bytes", "measured peak"], line: ["load_line_bytes", "load line"] };
  for (const [kind, [key, name]] of Object.entries(marks)) {
    if (!isKnown(device[key])) continue;
    const mark = element("div", { class: `mark ${kind}`, title: `${name} ${bytes(device[key])}` });
    mark.style.left = at(device[key]);
    made.append(mark);
  }
  made.hidden = most <= 0;
  return made;
}

const barText = (device) => {
  const planned = parts(device).map(([name, size]) => `${NAMES[name] ?? name} ${bytes(size)}`);
  return ["memory", ...planned, ...memoryFigures(device).map(([name, value]) => `${name} ${value}`)].join(", ");
};

function memoryFigures(device) {
  const line = device.in_run ? "load line" : "a run would take";
  const figures = [
    ["holds", device.held_bytes], ["planned peak", device.predicted_peak_bytes], ["measured peak", device.measured_peak_bytes],
    [line, device.load_line_bytes], ["free on the device", device.free_bytes], ["other processes", device.others_bytes],
    ["memory of the device", device.total_bytes],
  ];
  return figures.filter(([, size]) => isKnown(size)).map(([name, size]) => [name, bytes(size)]);
}

function hardwareFigures(device) {
  const of = (value, limit, unit) => (isKnown(value) ? `${value.toFixed(0)}${isKnown(limit) ? ` of ${limit.toFixed(0)}` : ""} ${unit}` : null);
  const { pcie } = device;
  return [
    ["busy", shown(device.utilization, percent)],
    ["temperature", of(device.temperature_c, null, "°C")],
    ["power", of(device.power_w, device.power_limit_w, "W")],
    ["clock", of(device.clock_mhz, device.clock_limit_mhz, "MHz")],
    ["clocks reduced by", device.throttled_by.join(", ") || null],
    ["PCIe", shown(pcie, () => `${pcie.generation_now}.0 × ${pcie.lanes_now} of ${pcie.generation}.0 × ${pcie.lanes}`)],
    ["hardware", device.model],
  ];
}

// Returns a table. A row has a name, one value or a list of values, and the kind of its swatch if it has one.
function table(caption, rows, headings) {
  const made = element("table", {}, element("caption", {}, caption));
  if (headings) made.append(element("tr", {}, element("td", {}), ...headings.map((text) => element("th", { scope: "col" }, text))));
  for (const [name, values, letter] of rows) {
    const head = element("th", { scope: "row" });
    if (letter) head.append(element("span", { class: `swatch ${letter}`, "aria-hidden": "true" }, LETTERS[letter]));
    head.append(NAMES[name] ?? name);
    made.append(element("tr", {}, head, ...[values].flat().map((value) => element("td", {}, value))));
  }
  return made;
}

// Returns the table of the parts of a device's memory: planned, and by category also measured if the run measured them.
function memoryTable(device) {
  const measured = device.measured_by_category;
  const rows = parts(device);
  if (!isKnown(measured)) return ["When the arena is fullest (planned)", rows.map(([name, size]) => [name, bytes(size), name])];
  const names = new Set(rows.map(([name]) => name));
  const unplanned = Object.entries(measured).filter(([name, size]) => size > 0 && !names.has(name)).map(([name]) => [name, 0]);
  const isCategory = (name) => name !== "charges" && name !== "others";
  const values = (name, size) => [bytes(size), isCategory(name) ? bytes(measured[name] ?? 0) : ""];
  return ["When the arena is fullest", [...unplanned, ...rows].map(([name, size]) => [name, values(name, size), name]), ["planned", "measured"]];
}

// Returns the tables below a device. They are shown on demand.
function detailTables(device) {
  const tables = [];
  const add = (caption, rows, headings) => rows.length && tables.push(table(caption, rows, headings));
  add(...memoryTable(device));
  const setBy = (work) => { const peak = peakOf(device.timeline ?? [], work); return peak ? `, ${placeOf(peak)}` : ""; };
  add("Peak of the arena (planned), with the op that sets it", Object.entries(device.by_program).map(([work, size]) => [`${work}${setBy(work)}`, bytes(size)]));
  const process = ({ pid, name, is_plimsoll, held_bytes }) =>
    [`${pid} ${name ?? "process"}${is_plimsoll ? " (Plimsoll)" : ""}`, shown(held_bytes, bytes) ?? "?"];
  add("Processes", device.processes.map(process));
  return tables;
}

// ---- Drawings with a cursor that follows keys and pointer.

const [WIDTH, HEIGHT, EDGE] = [600, 140, 6];

// `length` returns the number of places of the cursor, `now` its place or -1, `nearest` the place at a horizontal
// position, and `choose` moves it.
function followKeys(drawing, { length, now, nearest, choose }) {
  const moveTo = (place) => length() && choose(Math.max(0, Math.min(length() - 1, place)));
  drawing.addEventListener("keydown", (event) => {
    const at = now() < 0 ? length() : now();
    const target = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: length() - 1 }[event.key];
    if (target === undefined) return;
    event.preventDefault();
    moveTo(target);
  });
  drawing.addEventListener("pointermove", (event) => {
    if (length() === 0) return;
    const box = drawing.getBoundingClientRect();
    moveTo(nearest(((event.clientX - box.left) / box.width) * WIDTH));
  });
}

const canvas = (...shapes) => {
  const made = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", tabindex: 0 });
  made.append(...shapes);
  return made;
};

// Returns the horizontal position of a step in the drawing of points, which are in the order of their steps.
const stepScale = (points) => (step) => {
  const [from, to] = [points[0].step, points.at(-1).step];
  return to > from ? EDGE + ((step - from) / (to - from)) * (WIDTH - 2 * EDGE) : WIDTH / 2;
};

// Returns the index of the point that is nearest to a horizontal position.
function nearestPoint(points, at) {
  const x = stepScale(points);
  const distance = ({ step }) => Math.abs(x(step) - at);
  return points.reduce((best, point, index) => (distance(point) < distance(points[best]) ? index : best), 0);
}

const cursorLine = () => shape("line", { class: "cursor", y1: 0, y2: HEIGHT, visibility: "hidden" });

// ---- The arena of a device over one step, as planned.

const WORKS = {
  load: "while loading", forward: "in the forward pass", backward: "in the backward pass", update: "in the update",
  evaluate: "in an evaluation", score: "while scoring", reference: "while scoring under the initial weights",
  save: "while saving", generate: "while generating", "re-plan": "in a change of plan",
};
const PASSES = ["forward", "backward", "evaluate", "score", "reference", "generate"];
// Most times that the load line may exceed the peak for the map to show it, and height of the map in peaks if it does not.
const MAX_TIMES_PEAK = 2;
const ABOVE_PEAK = 1.1;

// Returns the place of a moment within its work, in the words of the terminal view.
function placeOf({ work, part, layer, op, tensor }) {
  if (!isKnown(op)) return "before the first op or after the last";
  const running = `at ${op === "product" ? "matrix product" : op}${isKnown(tensor) ? ` of ${tensor}` : ""}`;
  if (isKnown(layer)) return `layer ${layer}, ${running}`;
  return isKnown(part) && PASSES.includes(work) ? `${part}, ${running}` : running;
}

const momentOf = (point) => `${WORKS[point.work] ?? point.work}, ${placeOf(point)}`;

// Returns the first moment with the most bytes, of one kind of work if it is given; undefined without moments.
const peakOf = (timeline, work) =>
  timeline.filter((point) => !work || point.work === work).reduce((best, point) => (best && best.bytes >= point.bytes ? best : point), undefined);

// Returns name and bytes of each part of a device's memory at a moment, from the bottom.
const stackAt = (device, point) =>
  ["charges", ...Object.keys(LETTERS).filter((name) => name !== "charges" && name !== "others")]
    .map((name) => [name, (name === "charges" ? device.charges_bytes : point.by_category[name]) ?? 0]);

function mapView() {
  const bands = shape("g", {});
  const line = shape("line", { class: "load-line", x1: 0, x2: WIDTH });
  const cursor = cursorLine();
  const drawing = canvas(bands, line, cursor);
  const [sentence, works, legend, readout] = [element("p"), element("div", { class: "works", "aria-hidden": "true" }), element("p", { class: "hint" }), element("output")];
  const root = element("div", { class: "map" }, sentence, drawing, works, legend, readout);
  readout.setAttribute("aria-label", "memory at the cursor");
  let [device, chosen, drawn] = [null, null, ""];
  const length = () => device.timeline.length;
  const x = (place) => (WIDTH * place) / length();
  const showCursor = () => {
    cursor.setAttribute("visibility", chosen === null ? "hidden" : "visible");
    if (chosen === null) return setText(readout, "");
    const point = device.timeline[chosen];
    const stack = stackAt(device, point).filter(([, size]) => size > 0);
    for (const end of ["x1", "x2"]) cursor.setAttribute(end, x(chosen + 0.5));
    const total = stack.reduce((sum, [, size]) => sum + size, 0);
    setText(readout, `moment ${chosen + 1} of ${length()}: ${bytes(total)} ${momentOf(point)}: ${stack.map(([name, size]) => `${name} ${bytes(size)}`).join(", ")}`);
  };
  followKeys(drawing, {
    length,
    now: () => chosen ?? device.timeline.indexOf(peakOf(device.timeline)),
    nearest: (at) => Math.floor((at / WIDTH) * length()),
    choose: (place) => { chosen = place; showCursor(); },
  });

  const draw = () => {
    const stacks = device.timeline.map((point) => stackAt(device, point));
    const totals = stacks.map((stack) => stack.reduce((sum, [, size]) => sum + size, 0));
    const [peak, most] = [peakOf(device.timeline), Math.max(...totals, 1)];
    const limit = device.load_line_bytes ?? 0;
    const isAbove = limit > MAX_TIMES_PEAK * most;
    const top = isAbove ? ABOVE_PEAK * most : Math.max(limit / LINE_AT, most);
    const y = (size) => (HEIGHT * (1 - size / top)).toFixed(2);
    const below = stacks.map(() => 0);
    bands.replaceChildren(...stacks[0].map(([name], band) => {
      const above = stacks.map((stack, place) => below[place] + stack[band][1]);
      const upper = above.map((size, place) => `${place ? "V" : `M${x(0)} `}${y(size)}H${x(place + 1).toFixed(2)}`).join("");
      const lower = below.map((size, place) => `V${y(size)}H${x(place).toFixed(2)}`).toReversed().join("");
      const isEmpty = above.every((size, place) => size === below[place]);
      above.forEach((size, place) => { below[place] = size; });
      return shape("path", { class: `band ${name}`, d: isEmpty ? "" : `${upper}${lower}Z` });
    }));
    line.setAttribute("visibility", limit > 0 && !isAbove ? "visible" : "hidden");
    for (const end of ["y1", "y2"]) line.setAttribute(end, y(limit));
    setText(sentence, `Predicted peak ${bytes(device.predicted_peak_bytes ?? peak.bytes)} ${momentOf(peak)}.`);
    const isUsed = (name) => stacks.some((stack) => stack.some(([other, size]) => other === name && size > 0));
    const swatch = (name) => element("span", {}, element("span", { class: `swatch ${name}`, "aria-hidden": "true" }, LETTERS[name]), `${name} `);
    const names = stacks[0].map(([name]) => name).filter(isUsed);
    const height = !limit ? "" : isAbove ? `load line ${bytes(limit)}, above the drawing` : `thick line: load line ${bytes(limit)}`;
    legend.replaceChildren(...names.map(swatch), height);
    const runs = [];
    for (const { work } of device.timeline) {
      if (runs.at(-1)?.[0] === work) runs.at(-1)[1] += 1;
      else runs.push([work, 1]);
    }
    works.replaceChildren(...runs.map(([work, count]) => {
      const made = element("span", { title: work }, work);
      made.style.flexGrow = count;
      return made;
    }));
    drawing.setAttribute("aria-label", `arena of ${device.name} over one step: ${length()} moments, ${sentence.textContent} ${height}`);
  };

  const update = (next) => {
    device = next;
    root.hidden = next.timeline.length === 0;
    const text = JSON.stringify([next.timeline, next.charges_bytes, next.load_line_bytes, next.predicted_peak_bytes, next.name]);
    if (root.hidden || text === drawn) return;
    drawn = text;
    if (chosen !== null) chosen = Math.min(chosen, length() - 1);
    draw();
    showCursor();
  };
  return { root, update };
}

// Shows the measured memory of a device over the steps, as a line before bands: the planned bytes by category at the moment
// when the arena is fullest. Over the steps only the sum is measured.
function memoryView() {
  const [bands, measured] = [shape("g", {}), shape("path", { class: "measured-line" })];
  const limit = shape("line", { class: "load-line", x1: 0, x2: WIDTH });
  const cursor = cursorLine();
  const drawing = canvas(bands, limit, measured, cursor);
  const [caption, first, last, readout] = [element("p"), element("span"), element("span"), element("output")];
  const root = element("div", { class: "map memory" }, caption, drawing, element("div", { class: "axis" }, first, last), readout);
  readout.setAttribute("aria-label", "measured memory at the cursor");
  let [points, chosen, drawn] = [[], null, ""];
  const showCursor = () => {
    const place = points.findIndex(({ step }) => step === chosen);
    cursor.setAttribute("visibility", place < 0 ? "hidden" : "visible");
    if (place >= 0) for (const end of ["x1", "x2"]) cursor.setAttribute(end, stepScale(points)(chosen));
    setText(readout, place < 0 ? "" : `step ${chosen}: measured ${bytes(points[place].held_bytes)}`);
  };
  followKeys(drawing, {
    length: () => points.length,
    now: () => points.findIndex(({ step }) => step === chosen),
    nearest: (at) => nearestPoint(points, at),
    choose: (place) => { chosen = points[place].step; showCursor(); },
  });
  const draw = (device) => {
    const stack = stackAt(device, device);
    const planned = stack.reduce((sum, [, size]) => sum + size, 0);
    const most = Math.max(planned, ...points.map((point) => point.held_bytes), 1);
    const line = device.load_line_bytes ?? 0;
    const isAbove = line > MAX_TIMES_PEAK * most;
    const top = isAbove ? ABOVE_PEAK * most : Math.max(line / LINE_AT, most);
    const y = (size) => (HEIGHT * (1 - size / top)).toFixed(2);
    let below = 0;
    bands.replaceChildren(...stack.map(([name, size]) => {
      below += size;
      return shape("path", { class: `band ${name}`, d: `M0 ${y(below)}H${WIDTH}V${y(below - size)}H0Z` });
    }));
    const x = stepScale(points);
    const path = points.map((point, place) => `${place ? "L" : "M"}${x(point.step).toFixed(2)} ${y(point.held_bytes)}`);
    measured.setAttribute("d", path.join("") + (path.length === 1 ? "h1" : ""));
    limit.setAttribute("visibility", line > 0 && !isAbove ? "visible" : "hidden");
    for (const end of ["y1", "y2"]) limit.setAttribute(end, y(line));
    const [newest, highest] = [points.at(-1).held_bytes, Math.max(...points.map((point) => point.held_bytes))];
    // A run that has ended holds nothing; its newest measurement is shown.
    const held = isKnown(device.held_bytes) ? `measured ${bytes(device.held_bytes)}` : `last measured ${bytes(newest)}`;
    setText(caption, `Memory over the run: ${held} (line), at most ${bytes(device.measured_peak_bytes ?? highest)}; planned by category when fullest (bands).`);
    setText(first, `step ${points[0].step}`);
    setText(last, `step ${points.at(-1).step}`);
    drawing.setAttribute("aria-label", `memory of ${device.name} from step ${points[0].step} to ${points.at(-1).step}: ${caption.textContent}`);
  };
  const update = (device) => {
    points = device.memory_history ?? [];
    root.hidden = points.length === 0;
    const text = JSON.stringify([points, parts(device), device.load_line_bytes, device.held_bytes, device.measured_peak_bytes, device.name]);
    if (root.hidden || text === drawn) return;
    drawn = text;
    draw(device);
    showCursor();
  };
  return { root, update };
}

// Creates the part of the page that shows one device, and returns it with the function that updates it.
function deviceView() {
  const heading = element("h3");
  const ledger = element("div");
  const figures = element("dl", { class: "figures" });
  const tables = element("div");
  const details = element("details", {}, element("summary", {}, "Memory by category and by work"), tables);
  const [map, memory] = [mapView(), memoryView()];
  const root = element("article", { class: "card" }, heading, ledger, map.root, memory.root, figures, details);
  const update = (device) => {
    setText(heading, `${device.name}${device.simulated ? " (simulated)" : ""}`);
    root.setAttribute("aria-label", heading.textContent);
    const drawn = bar(device);
    if (ledger.dataset.text !== drawn.getAttribute("aria-label")) {
      ledger.dataset.text = drawn.getAttribute("aria-label");
      ledger.replaceChildren(drawn);
    }
    map.update({ ...device, timeline: device.timeline ?? [] });
    memory.update(device);
    setFigures(figures, [...memoryFigures(device), ...hardwareFigures(device)]);
    const made = detailTables(device);
    details.hidden = made.length === 0;
    setList(tables, made);
  };
  return { root, update };
}

let deviceViews = [];

function showDevices(devices) {
  while (deviceViews.length < devices.length) {
    const view = deviceView();
    deviceViews.push(view);
    byId("devices").append(view.root);
  }
  for (const { root } of deviceViews.splice(devices.length)) root.remove();
  devices.forEach((device, index) => deviceViews[index].update(device));
}

// ---- Plots over steps.

const PLOTS = [
  ["loss", "loss", (value) => value.toFixed(4)],
  ["learning rate", "learning_rate", rate],
  ["gradient norm", "gradient_norm", (value) => value.toFixed(2)],
  ["tokens/s", "tokens_per_second", count],
];

function plotView([name, key, format]) {
  const line = shape("path", { class: "line" });
  const cursor = cursorLine();
  const drawing = canvas(line, cursor);
  const [heading, range, first, last, readout] = [element("h3"), element("span"), element("span"), element("span"), element("output")];
  const root = element("article", { class: "card" }, heading, drawing, element("div", { class: "axis" }, first, range, last), readout);
  let points = [];
  // The step of the cursor. It stays at its step while new ones arrive.
  let chosen = null;

  const showCursor = () => {
    const point = points.find(({ step }) => step === chosen);
    cursor.setAttribute("visibility", point ? "visible" : "hidden");
    if (point) for (const end of ["x1", "x2"]) cursor.setAttribute(end, stepScale(points)(chosen));
    setText(readout, point ? `step ${point.step}: ${format(point[key])}` : "");
  };
  followKeys(drawing, {
    length: () => points.length,
    now: () => points.findIndex(({ step }) => step === chosen),
    nearest: (at) => nearestPoint(points, at),
    choose: (place) => { chosen = points[place].step; showCursor(); },
  });
  readout.setAttribute("aria-label", `${name} at the cursor`);

  const update = (history) => {
    points = history.filter((point) => isKnown(point[key]));
    root.hidden = points.length === 0;
    if (points.length === 0) return;
    const values = points.map((point) => point[key]);
    const [least, most, newest] = [Math.min(...values), Math.max(...values), values.at(-1)];
    const y = (value) => (most > least ? EDGE + ((most - value) / (most - least)) * (HEIGHT - 2 * EDGE) : HEIGHT / 2);
    const x = stepScale(points);
    const path = points.map((point, index) => `${index ? "L" : "M"}${x(point.step).toFixed(2)} ${y(point[key]).toFixed(2)}`);
    // A path of one point has no length: a short line shows it.
    line.setAttribute("d", path.join("") + (path.length === 1 ? "h1" : ""));
    setText(heading, `${name} ${format(newest)}`);
    setText(range, `${format(least)} to ${format(most)}`);
    setText(first, `step ${points[0].step}`);
    setText(last, `step ${points.at(-1).step}`);
    const label = `${name} from step ${points[0].step} to ${points.at(-1).step}: first ${format(values[0])}, newest ${format(newest)}, least ${format(least)}, most ${format(most)}`;
    drawing.setAttribute("aria-label", label);
    showCursor();
  };
  return { root, update };
}

let plotViews = [];

// Shows plots without points and without cursors.
function resetPlots() {
  plotViews = PLOTS.map(plotView);
  byId("plots").replaceChildren(...plotViews.map(({ root }) => root));
}

// ---- Snapshots as they arrive.

const OVER = ["done", "stopped", "died"];
// The run of the newest snapshot, as `runOf` returns it; undefined before the first snapshot.
let shownRun;

// Returns what tells a run from others: its folder, and the times of its first step and its first listed event. Returns
// null without a run.
const runOf = ({ run, feed }) => run && { folder: run.folder, state: run.state, firstStep: run.history[0]?.time, firstEvent: feed[0]?.time };

// Returns whether a snapshot shows another run than the one before. A run that goes back to step 0 has another first
// step, and the same first event.
function isOtherRun(before, now) {
  if (before === undefined) return false;
  if (!before || !now) return before !== now;
  if (before.folder !== now.folder) return true;
  const hasOtherEvent = !isKnown(before.firstEvent) || before.firstEvent !== now.firstEvent;
  return isKnown(before.firstStep) && before.firstStep !== now.firstStep && hasOtherEvent;
}

const nameOf = (run) => run?.folder ?? "the devices of the machine";

function show(snapshot) {
  const run = runOf(snapshot);
  if (isOtherRun(shownRun, run)) {
    byId("other-run").hidden = false;
    setText(byId("other-run"), `Another run: this address now shows ${nameOf(run)}. Until ${byId("updated").textContent.replace("at ", "")} it showed ${nameOf(shownRun)}.`);
    showDevices([]);
    resetPlots();
  }
  shownRun = run;
  showRun(snapshot.run);
  showPlan(snapshot.run?.plan);
  showMachine(snapshot);
  showWarnings(snapshot.warnings);
  showRecommendations(snapshot.recommendations);
  showDevices(snapshot.devices);
  showFeed(snapshot.feed);
  for (const { update } of plotViews) update(snapshot.run?.history ?? []);
  setText(byId("updated"), `at ${timeOfDay(snapshot.at)}`);
}

// Pause before a new connection if the server has refused one, or has ended.
const RETRY_MS = 3000;
let source = null;
let retry = null;
// Whether the server has said that it ends, with a last snapshot of a run that is over. Nothing can follow.
let isFinal = false;

const showConnection = (text) => setText(byId("connection"), text);
const isRunOver = () => Boolean(shownRun) && OVER.includes(shownRun.state);

// Shows that the newest snapshot may be out of date.
function showLastKnown() {
  showConnection("no connection; the figures are those of the last one");
  if (shownRun && !isRunOver()) setText(byId("state"), `${STATES[shownRun.state] ?? shownRun.state} (last known)`);
}

function connectLater() {
  clearTimeout(retry);
  retry = setTimeout(connect, RETRY_MS);
}

function connect() {
  clearTimeout(retry);
  if (isFinal) return;
  source?.close();
  // A hidden page requests the last snapshot only, which the server sends when it ends.
  source = new EventSource(document.hidden ? "/api/events/last" : "/api/events");
  source.addEventListener("snapshot", (event) => {
    showConnection("live");
    show(JSON.parse(event.data));
  });
  source.addEventListener("failure", (event) => showConnection(JSON.parse(event.data).error.message));
  source.addEventListener("end", () => {
    source.close();
    isFinal = isRunOver();
    if (!isFinal) showLastKnown();
    showConnection(isFinal ? "the run has ended" : "the server has ended; the figures are the last ones");
    connectLater();
  });
  source.addEventListener("error", () => {
    showLastKnown();
    // After a refusal the browser gives up by itself.
    if (source.readyState === EventSource.CLOSED) connectLater();
  });
}

resetPlots();
document.addEventListener("visibilitychange", connect);
connect();
