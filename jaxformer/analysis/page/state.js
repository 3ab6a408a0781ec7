// What is shown, and the parts of it that several views need.
const PAGE = 128; // tokens on either side at once
const state = {
  view: "lines",
  part: 0,
  layer: 0,
  heads: [],
  row: null, // index of the chosen token in its map, or null
  column: null,
  pinned: false,
  firstRow: 0, // where the visible part begins
  firstColumn: 0,
  dark: false,
};

const part = () => facts.parts[state.part];
const mapOf = (place) => facts.maps[facts.parts[place].map];
const map = () => mapOf(state.part);

// The rows and columns of the part, then those of them that are visible.
function bounds(axis) {
  const [first, end] = part()[axis] || [0, map()[axis].length];
  const wanted = axis === "rows" ? state.firstRow : state.firstColumn;
  const begin = Math.max(first, Math.min(wanted, end - PAGE));
  return { first, end, begin, stop: Math.min(begin + PAGE, end) };
}

// Equally light hues, so that none is pale on the ground and numbers can be read on all.
function headColour(head) {
  const hue = (255 + (360 * head) / Math.max(map().heads.length, 1)) % 360;
  return state.dark ? `oklch(0.77 0.14 ${hue})` : `oklch(0.54 0.17 ${hue})`;
}

// A colour of the style sheet as numbers; the browser resolves light and dark.
function colour(name) {
  const probe = document.body.appendChild(element("span"));
  probe.style.color = `var(--${name})`;
  const found = getComputedStyle(probe).color.match(/[\d.]+/g).slice(0, 3).map(Number);
  probe.remove();
  return found;
}

function sized(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.max(1, Math.round(width * ratio));
  canvas.height = Math.max(1, Math.round(height * ratio));
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  return context;
}

const quoted = (text) => element("span", {}, "“", spelled(text), "”");
const layerName = () => `layer ${map().layers[state.layer]}`;

function headNames() {
  const numbers = state.heads.map((head) => map().heads[head]);
  if (numbers.length === 1) return `head ${numbers[0]}`;
  return numbers.length === map().heads.length ? `mean of ${numbers.length} heads` : `mean of heads ${numbers.join(", ")}`;
}

// What the chosen token takes, or what is taken of it, in words.
function tell() {
  const readout = document.getElementById("readout");
  readout.replaceChildren(element("i", {}, `${layerName()} · ${headNames()} · `));
  const { row, column } = state;
  if (state.view === "heads") readout.append(element("i", {}, "click on a picture, or Enter, to open it"));
  else if (!state.heads.length) readout.append("no head is chosen");
  else if (row !== null && column !== null) tellPair(readout, row, column);
  else if (row !== null) tellRow(readout, row);
  else if (column !== null) tellColumn(readout, column);
  else readout.append(element("i", {}, "point at a token, or choose one with the arrow keys"));
}

function tellPair(readout, row, column) {
  const weight = meanWeights(map(), state.layer, state.heads, row, null)[column];
  readout.append(quoted(map().rows[row]), " → ", quoted(map().columns[column]), " ",
    element("b", { class: "value" }, weight.toFixed(3)), element("i", {}, `  row ${map().firstRow + row}, column ${map().firstColumn + column}`));
}

function tellRow(readout, row) {
  const weights = meanWeights(map(), state.layer, state.heads, row, null);
  readout.append(quoted(map().rows[row]), " looks at  ");
  const hidden = map().totalColumns - map().columns.length;
  list(readout, weights, map().columns, hidden > 0 ? "nothing that the page holds" : "nothing");
  const rest = 1 - weights.reduce((sum, weight) => sum + weight, 0);
  if (hidden > 0 && areDistributions(map(), state.layer, state.heads) && rest > 0.002 && weights.some((weight) => weight > 0)) {
    readout.append(element("i", {}, `and ${rest.toFixed(3)} at ${hidden} tokens that the page doesn't hold`));
  }
}

function tellColumn(readout, column) {
  readout.append(quoted(map().columns[column]), " is looked at by ");
  list(readout, meanWeights(map(), state.layer, state.heads, null, column), map().rows, "none");
}

function list(readout, weights, texts, nothing) {
  const order = [...weights.keys()].filter((i) => weights[i] !== 0).sort((a, b) => Math.abs(weights[b]) - Math.abs(weights[a]));
  if (!order.length) readout.append(nothing);
  for (const i of order.slice(0, 12)) {
    readout.append(element("span", { class: "entry" }, quoted(texts[i]), " ", element("b", {}, weights[i].toFixed(3))), " ");
  }
  if (order.length > 12) readout.append(element("i", {}, `and ${order.length - 12} more`));
}
