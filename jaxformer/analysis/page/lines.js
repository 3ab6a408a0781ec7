// Tokens on two sides and lines between them, as wide and opaque as the weights.
const FAINTEST = 0.02;
const MOST_LINES = 3000;
const LEVELS = 8;

function drawLines() {
  const rows = bounds("rows");
  const columns = bounds("columns");
  const count = Math.max(rows.stop - rows.begin, columns.stop - columns.begin);
  const line = count > 48 ? 20 : 25;
  document.getElementById("lines").style.setProperty("--line", `${line}px`);
  fillTokens("rows", rows);
  fillTokens("columns", columns);
  const canvas = document.getElementById("links");
  canvas.style.width = "";
  const context = sized(canvas, canvas.clientWidth, count * line);
  const place = (bound, index) => (index - bound.begin + 0.5) * line;
  const faintest = leastStrength(rows, columns);
  for (const head of state.heads) {
    const levels = levelsOf(head, rows, columns, place, faintest);
    const aside = (state.heads.indexOf(head) - (state.heads.length - 1) / 2) * Math.min(2.5, (line - 9) / state.heads.length);
    levels.forEach((paths, level) => strokeLevel(context, canvas.clientWidth, headColour(head), level, paths, aside));
  }
  shade();
}

// Calls visit(row, column, strength) for all pairs of visible tokens, or for those of the chosen one.
function eachPair(head, rows, columns, visit) {
  for (let row = rows.begin; row < rows.stop; row++) {
    if (state.row !== null && row !== state.row) continue;
    const start = rowStart(map(), state.layer, head, row);
    for (let column = columns.begin; column < columns.stop; column++) {
      if (state.column !== null && column !== state.column) continue;
      visit(row, column, asStrength(map(), state.layer, head, bytes[start + column]));
    }
  }
}

// The strength from which on there are few enough lines to be drawn at once.
function leastStrength(rows, columns) {
  const counts = new Uint32Array(256);
  for (const head of state.heads) {
    eachPair(head, rows, columns, (row, column, strength) => counts[Math.round(Math.abs(strength) * 255)]++);
  }
  let [least, drawn] = [255, 0];
  while (least > 1 && drawn + counts[least] <= MOST_LINES) drawn += counts[least--];
  return Math.min(1, Math.max(FAINTEST, (least + 0.5) / 255));
}

// Ends of the lines of one head, by how strong they are; those of negative weights follow in levels of their own.
function levelsOf(head, rows, columns, place, faintest) {
  const levels = Array.from({ length: 2 * LEVELS + 1 }, () => []);
  eachPair(head, rows, columns, (row, column, strength) => {
    const size = Math.abs(strength);
    if (size < faintest) return;
    levels[Math.ceil(size * LEVELS) + (strength < 0 ? LEVELS : 0)].push([place(rows, row), place(columns, column)]);
  });
  return levels;
}

// Heads keep a little apart, so that none covers another.
function strokeLevel(context, width, style, step, paths, aside) {
  if (!paths.length) return;
  const level = step > LEVELS ? step - LEVELS : step;
  context.setLineDash(step > LEVELS ? [5, 4] : []);
  const chosen = state.row !== null || state.column !== null;
  context.strokeStyle = style;
  context.globalAlpha = Math.min(1, (level / LEVELS) * (chosen ? 1 : 0.8) + (chosen ? 0.12 : 0));
  context.lineWidth = 0.8 + (2 * level) / LEVELS;
  context.beginPath();
  for (const [from, to] of paths) {
    context.moveTo(2, from + aside);
    context.bezierCurveTo(width * 0.4, from + aside, width * 0.6, to + aside, width - 2, to + aside);
  }
  context.stroke();
}

// The tokens of one side; made again only where others than before are visible.
function fillTokens(axis, bound) {
  const side = document.getElementById(axis);
  const key = `${state.part} ${bound.begin} ${bound.stop}`;
  if (side.dataset.key === key) return;
  side.dataset.key = key;
  const first = axis === "rows" ? map().firstRow : map().firstColumn;
  side.replaceChildren();
  for (let i = bound.begin; i < bound.stop; i++) {
    const text = spelled(map()[axis][i], { class: "text" });
    const [bars, number] = [element("span", { class: "bars" }), element("span", { class: "number" })];
    const index = element("span", { class: "index" }, String(first + i));
    const item = element("li", { "data-index": i, title: `${visible(map()[axis][i])} (${first + i})` });
    item.append(...(axis === "rows" ? [index, number, bars, text] : [text, bars, number, index]));
    side.append(item);
  }
}

// The side that is not chosen gets a bar for each head, and the mean as a number.
function shade() {
  for (const axis of ["rows", "columns"]) {
    const [own, other] = axis === "rows" ? [state.row, state.column] : [state.column, state.row];
    const shown = other !== null && own === null && state.heads.length > 0;
    const along = axis === "columns";
    const weights = shown && meanWeights(map(), state.layer, state.heads, along ? other : null, along ? null : other);
    for (const item of document.getElementById(axis).children) {
      const index = Number(item.dataset.index);
      item.classList.toggle("chosen", index === own);
      const number = item.querySelector(".number");
      number.textContent = shown && weights[index] !== 0 ? weights[index].toFixed(3) : "";
      fillBars(item.querySelector(".bars"), shown, (head) =>
        along ? rowStart(map(), state.layer, head, other) + index : rowStart(map(), state.layer, head, index) + other);
    }
  }
}

function fillBars(bars, shown, address) {
  const width = Math.max(3, Math.min(26, Math.floor(72 / Math.max(state.heads.length, 1))));
  bars.style.setProperty("--bar", `${width}px`);
  bars.classList.toggle("off", !shown);
  while (bars.children.length > state.heads.length) bars.lastChild.remove();
  while (bars.children.length < state.heads.length) bars.append(element("i"));
  if (!shown) return;
  state.heads.forEach((head, place) => {
    const strength = asStrength(map(), state.layer, head, bytes[address(head)]);
    const plain = headColour(head);
    const striped = `repeating-linear-gradient(45deg, ${plain} 0 3px, transparent 3px 5px)`;
    bars.children[place].style.background = strength < 0 ? striped : plain;
    bars.children[place].style.opacity = Math.abs(strength);
  });
}

function listenToTokens(axis) {
  const side = document.getElementById(axis);
  const own = axis === "rows" ? "row" : "column";
  const other = axis === "rows" ? "column" : "row";
  const indexOf = (event) => {
    const item = event.target.closest("li");
    return item ? Number(item.dataset.index) : null;
  };
  side.addEventListener("pointerover", (event) => {
    const index = indexOf(event);
    if (!state.pinned && index !== null && state[own] !== index) choose({ [own]: index, [other]: null });
  });
  side.addEventListener("pointerleave", () => !state.pinned && choose({ row: null, column: null }));
  side.addEventListener("click", (event) => {
    const index = indexOf(event);
    if (index === null) return;
    const same = state.pinned && state[own] === index;
    state.pinned = !same;
    choose(same ? { row: null, column: null } : { [own]: index, [other]: null });
  });
}
