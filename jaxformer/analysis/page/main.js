// Choices above the views, keys, and what happens first.
const VIEWS = { lines: drawLines, matrix: drawMatrix, heads: drawHeads };
const MOST_AT_FIRST = 512; // rows of all heads together that are not yet a tangle
const get = (id) => document.getElementById(id);

let tellWindows = () => {};

function draw() {
  VIEWS[state.view]();
  tellWindows();
  get("layer").value = state.layer;
  get("chips").querySelectorAll("[data-head]").forEach((chip) => {
    const head = Number(chip.dataset.head);
    chip.style.setProperty("--chip", headColour(head));
    chip.setAttribute("aria-pressed", state.heads.includes(head));
  });
  tell();
}

let waiting = false;
function choose(change) {
  Object.assign(state, change);
  if (waiting) return;
  waiting = true; // one drawing a frame, however fast the pointer moves
  requestAnimationFrame(() => {
    waiting = false;
    draw();
  });
}

function show(view) {
  state.view = view;
  for (const name of Object.keys(VIEWS)) {
    get(name).hidden = name !== view;
    get(`tab-${name}`).setAttribute("aria-selected", name === view);
    get(`tab-${name}`).tabIndex = name === view ? 0 : -1;
  }
  if (view === "heads") Object.assign(state, { row: null, column: null, pinned: false });
  draw();
}

// Another part may have other tokens, layers and heads.
function showPart(place) {
  const before = state.heads;
  Object.assign(state, { part: place, row: null, column: null, pinned: false, firstRow: 0, firstColumn: 0 });
  state.layer = Math.min(state.layer, map().layers.length - 1);
  state.heads = before.filter((head) => head < map().heads.length);
  const few = map().heads.length * map().rows.length <= MOST_AT_FIRST;
  if (!state.heads.length) state.heads = few ? [...map().heads.keys()] : [0];
  get("part").value = place;
  get("layer").replaceChildren(...map().layers.map((number, i) => element("option", { value: i }, String(number))));
  const chips = map().heads.map((number, i) => element("button", { "data-head": i, title: "only this head; with Ctrl or Shift as well as the others" }, String(number)));
  get("chips").replaceChildren(element("span", {}, "Heads"), ...chips, element("button", { class: "every", title: "all heads (a)" }, "all"));
  makeWindows();
  draw();
}

// Sliders over what is more than one screen, and a line on what the page does not hold.
function makeWindows() {
  const made = [];
  const tellers = [];
  tellWindows = () => tellers.forEach((teller) => teller());
  for (const [axis, name] of [["rows", "firstRow"], ["columns", "firstColumn"]]) {
    const { first, end } = bounds(axis);
    if (end - first <= PAGE) continue;
    const slider = element("input", { type: "range", min: first, max: end - PAGE, value: first, step: 1, id: name });
    const told = element("span");
    slider.addEventListener("input", () => choose({ ...windowFrom(name, Number(slider.value)), row: null, column: null, pinned: false }));
    tellers.push(() => {
      const { begin, stop } = bounds(axis);
      slider.value = begin;
      told.textContent = `${map()[name] + begin} to ${map()[name] + stop - 1}`;
    });
    made.push(element("label", {}, axis === "rows" ? "From" : "To", slider, told));
  }
  const { rows, columns, totalRows, totalColumns, firstRow, firstColumn } = map();
  if (rows.length < totalRows || columns.length < totalColumns) {
    made.push(element("span", {}, `The page holds rows ${firstRow} to ${firstRow + rows.length - 1} of ${totalRows}, columns ${firstColumn} to ${firstColumn + columns.length - 1} of ${totalColumns}.`));
  }
  get("windows").replaceChildren(...made);
}

// Where the visible part begins; rows take the columns of a sequence to itself with them.
function windowFrom(name, value) {
  const both = name === "firstRow" && map().rows.length === map().columns.length && get("firstColumn");
  return both ? { firstRow: value, firstColumn: value } : { [name]: value };
}

function chooseHead(event) {
  const chip = event.target.closest("button");
  if (!chip) return;
  const head = Number(chip.dataset.head);
  if (chip.dataset.head === undefined) state.heads = [...map().heads.keys()];
  else if (!(event.ctrlKey || event.metaKey || event.shiftKey)) state.heads = [head];
  else if (state.heads.includes(head)) state.heads = state.heads.filter((other) => other !== head);
  else state.heads = [...state.heads, head].sort((a, b) => a - b);
  draw();
}

const cycle = (value, change, count) => (value + change + count) % count;
const nextHead = (change) => choose({ heads: [state.heads.length === 1 ? cycle(state.heads[0], change, map().heads.length) : 0] });
const nextLayer = (change) => choose({ layer: cycle(state.layer, change, map().layers.length) });

// The next token of a side; at the edge of what is visible the window moves along.
function step(name, change) {
  const [axis, other] = name === "row" ? ["rows", "column"] : ["columns", "row"];
  const { first, end, begin, stop } = bounds(axis);
  const now = state[name];
  const next = now === null ? (change > 0 ? begin : stop - 1) : Math.max(first, Math.min(end - 1, now + change));
  const window = name === "row" ? "firstRow" : "firstColumn";
  const moved = next < begin ? windowFrom(window, next) : next >= stop ? windowFrom(window, next - PAGE + 1) : {};
  choose({ ...moved, [name]: next, pinned: true, ...(state.view === "lines" ? { [other]: null } : {}) });
  if (state.view !== "lines") return;
  requestAnimationFrame(() => get(axis).querySelector(`[data-index="${next}"]`)?.scrollIntoView({ block: "nearest" }));
}

const ARROWS = {
  lines: {
    ArrowUp: () => step("row", -1),
    ArrowDown: () => step("row", 1),
    "Shift+ArrowUp": () => step("column", -1),
    "Shift+ArrowDown": () => step("column", 1),
    ArrowLeft: () => nextHead(-1),
    ArrowRight: () => nextHead(1),
  },
  matrix: { ArrowUp: () => step("row", -1), ArrowDown: () => step("row", 1), ArrowLeft: () => step("column", -1), ArrowRight: () => step("column", 1) },
  heads: { ArrowUp: () => moveInGrid(-1, 0), ArrowDown: () => moveInGrid(1, 0), ArrowLeft: () => moveInGrid(0, -1), ArrowRight: () => moveInGrid(0, 1) },
};
const KEYS = {
  1: () => show("lines"),
  2: () => show("matrix"),
  3: () => show("heads"),
  ",": () => nextHead(-1),
  ".": () => nextHead(1),
  "[": () => nextLayer(-1),
  "]": () => nextLayer(1),
  a: () => choose({ heads: [...map().heads.keys()] }),
  d: () => setDark(!state.dark),
  Escape: () => choose({ row: null, column: null, pinned: false }),
};

function onKey(event) {
  if (event.ctrlKey || event.metaKey || (event.altKey && !"[]".includes(event.key))) return;
  if (event.target.matches("select, input")) return;
  if (event.target.matches("[role=tab]") && event.key.startsWith("Arrow")) return moveTab(event);
  const shifted = event.shiftKey && event.key.startsWith("Arrow");
  const action = ARROWS[state.view][shifted ? `Shift+${event.key}` : event.key] || KEYS[event.key];
  if (!action) return;
  event.preventDefault();
  action();
}

function moveTab(event) {
  const names = Object.keys(VIEWS);
  const change = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!change) return;
  event.preventDefault();
  show(names[cycle(names.indexOf(state.view), change, names.length)]);
  get(`tab-${state.view}`).focus();
}

function setDark(dark) {
  state.dark = dark;
  document.documentElement.style.colorScheme = dark ? "dark" : "light";
  draw();
}

function listen() {
  const main = document.querySelector("main");
  for (const name of Object.keys(VIEWS)) {
    get(`tab-${name}`).addEventListener("click", (event) => {
      show(name);
      if (event.detail > 0) main.focus({ preventScroll: true }); // by pointer: arrow keys then move in the view
    });
  }
  main.addEventListener("click", (event) => !event.target.closest("li, canvas, button") && KEYS.Escape());
  get("part").addEventListener("change", (event) => showPart(Number(event.target.value)));
  get("layer").addEventListener("change", (event) => choose({ layer: Number(event.target.value) }));
  get("chips").addEventListener("click", chooseHead);
  get("theme").addEventListener("click", () => setDark(!state.dark));
  listenToTokens("rows");
  listenToTokens("columns");
  listenToCells();
  listenToHeads();
  document.addEventListener("keydown", onKey);
  window.addEventListener("resize", () => choose({}));
}

async function begin() {
  const wish = matchMedia("(prefers-color-scheme: dark)");
  state.dark = wish.matches;
  wish.addEventListener("change", () => setDark(wish.matches));
  get("part").replaceChildren(...facts.parts.map((entry, i) => element("option", { value: i }, entry.title)));
  get("part-label").hidden = facts.parts.length === 1;
  try {
    await unpack();
  } catch (error) {
    get("loading").textContent = `The weights can't be unpacked: ${error}`;
    return;
  }
  get("loading").hidden = true;
  listen();
  get("lines").hidden = false;
  showPart(0);
  show("lines");
  document.documentElement.dataset.ready = "true";
  performance.mark("ready");
}

begin();
