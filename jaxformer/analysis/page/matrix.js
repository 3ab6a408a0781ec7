// One head (or the mean of several) as a matrix: a row for each token that looks.
const matrix = { left: 0, top: 0, cell: 1 };

function drawMatrix() {
  const [rows, columns] = [bounds("rows"), bounds("columns")];
  const canvas = document.getElementById("cells");
  const context = canvas.getContext("2d");
  const font = `${rows.stop - rows.begin > 64 ? 10 : 12}px ${getComputedStyle(document.body).fontFamily}`;
  context.font = font;
  const longest = (axis, bound) => Math.min(110, 10 + Math.max(...map()[axis].slice(bound.begin, bound.stop).map((text) => context.measureText(visible(text.slice(0, 60))).width)));
  [matrix.left, matrix.top] = [longest("rows", rows), longest("columns", columns)];
  const room = document.querySelector("main").clientWidth - matrix.left - 4;
  matrix.cell = Math.max(7, Math.min(34, Math.floor(room / (columns.stop - columns.begin))));
  const width = matrix.left + matrix.cell * (columns.stop - columns.begin) + 2;
  const height = matrix.top + matrix.cell * (rows.stop - rows.begin) + 2;
  canvas.style.width = `${width}px`;
  const scaled = sized(canvas, width, height);
  scaled.font = font;
  const weights = state.heads.length ? [...Array(rows.stop - rows.begin).keys()].map((i) => strengths(rows.begin + i)) : [];
  paintCells(scaled, weights, rows, columns);
  paintLabels(scaled, rows, columns);
  canvas.setAttribute("aria-label", `${part().title}, ${layerName()}, ${headNames()}`);
}

// The mean over the chosen heads of how strong the weights of a row are, with signs.
function strengths(row) {
  const sums = new Float64Array(map().columns.length);
  for (const head of state.heads) {
    const start = rowStart(map(), state.layer, head, row);
    for (let i = 0; i < sums.length; i++) sums[i] += asStrength(map(), state.layer, head, bytes[start + i]) / state.heads.length;
  }
  return sums;
}

// Square roots, so that faint weights are seen too.
function shadeOf(strength, ground, plus, minus) {
  const share = Math.sqrt(Math.abs(strength));
  const full = strength < 0 ? minus : plus;
  return ground.map((value, i) => Math.round(value + (full[i] - value) * share));
}

function paintCells(context, weights, rows, columns) {
  const [ground, plus, minus, ink, paper] = ["blank", "plus", "minus", "ink", "paper"].map(colour);
  const gap = matrix.cell > 11 ? 1 : 0;
  const numbered = matrix.cell >= 30 && areDistributions(map(), state.layer, state.heads);
  weights.forEach((line, i) => {
    for (let j = columns.begin; j < columns.stop; j++) {
      const shade = shadeOf(line[j], ground, plus, minus);
      context.fillStyle = `rgb(${shade.join(",")})`;
      const [x, y] = [matrix.left + (j - columns.begin) * matrix.cell, matrix.top + i * matrix.cell];
      context.fillRect(x, y, matrix.cell - gap, matrix.cell - gap);
      if (numbered && line[j] >= 0.005) paintNumber(context, line[j], x, y, contrast(shade, ink) > contrast(shade, paper) ? ink : paper);
    }
  });
  const [row, column] = [state.row, state.column];
  context.strokeStyle = `rgb(${ink.join(",")})`;
  context.lineWidth = 1.5;
  const [x, y] = [matrix.left + (column - columns.begin) * matrix.cell, matrix.top + (row - rows.begin) * matrix.cell];
  if (row !== null) context.strokeRect(matrix.left, y, matrix.cell * (columns.stop - columns.begin) - gap, matrix.cell - gap);
  if (column !== null) context.strokeRect(x, matrix.top, matrix.cell - gap, matrix.cell * (rows.stop - rows.begin) - gap);
}

// How readable one colour is on another, from 1 on (WCAG 2.2).
function contrast(one, other) {
  const [high, low] = [luminance(one), luminance(other)].sort((a, b) => b - a);
  return (high + 0.05) / (low + 0.05);
}

function luminance(parts) {
  const linear = parts.map((part) => (part <= 10 ? part / 255 / 12.92 : ((part / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
}

// The weight inside its cell, where there is room.
function paintNumber(context, weight, x, y, ink) {
  context.save();
  context.font = context.font.replace(/^\d+px/, "10px");
  [context.textAlign, context.textBaseline] = ["center", "middle"];
  context.fillStyle = `rgb(${ink.join(",")})`;
  context.fillText(weight.toFixed(2).replace(/^0/, ""), x + (matrix.cell - 1) / 2, y + matrix.cell / 2);
  context.restore();
}

function paintLabels(context, rows, columns) {
  const step = Math.ceil((rows.stop - rows.begin > 64 ? 11 : 13) / matrix.cell);
  const [quiet, ink] = ["quiet", "ink"].map((name) => `rgb(${colour(name).join(",")})`);
  context.textBaseline = "middle";
  const shown = (bound, index, chosen) => (index - bound.begin) % step === 0 || index === chosen;
  context.textAlign = "right";
  for (let i = rows.begin; i < rows.stop; i++) {
    if (!shown(rows, i, state.row)) continue;
    context.fillStyle = i === state.row ? ink : quiet;
    context.fillText(cut(context, map().rows[i], matrix.left), matrix.left - 6, matrix.top + (i - rows.begin + 0.5) * matrix.cell);
  }
  context.textAlign = "left";
  for (let j = columns.begin; j < columns.stop; j++) {
    if (!shown(columns, j, state.column)) continue;
    context.save();
    context.translate(matrix.left + (j - columns.begin + 0.5) * matrix.cell, matrix.top - 6);
    context.rotate(-Math.PI / 2);
    context.fillStyle = j === state.column ? ink : quiet;
    context.fillText(cut(context, map().columns[j], matrix.top), 0, 0);
    context.restore();
  }
}

// A label no longer than its room.
function cut(context, token, room) {
  const text = [...visible(token.slice(0, 60))];
  if (context.measureText(text.join("")).width <= room - 8) return text.join("");
  while (text.length > 1 && context.measureText(text.join("") + "…").width > room - 8) text.pop();
  return text.join("") + "…";
}

function listenToCells() {
  const canvas = document.getElementById("cells");
  const at = (event) => {
    const box = canvas.getBoundingClientRect();
    const [rows, columns] = [bounds("rows"), bounds("columns")];
    const row = rows.begin + Math.floor((event.clientY - box.top - matrix.top) / matrix.cell);
    const column = columns.begin + Math.floor((event.clientX - box.left - matrix.left) / matrix.cell);
    const within = row >= rows.begin && row < rows.stop && column >= columns.begin && column < columns.stop;
    return within ? { row, column } : { row: null, column: null };
  };
  canvas.addEventListener("pointermove", (event) => {
    const found = at(event);
    if (!state.pinned && (found.row !== state.row || found.column !== state.column)) choose(found);
  });
  canvas.addEventListener("pointerleave", () => !state.pinned && choose({ row: null, column: null }));
  canvas.addEventListener("click", (event) => {
    const found = at(event);
    state.pinned = found.row !== null && !(state.pinned && found.row === state.row && found.column === state.column);
    choose(state.pinned ? found : { row: null, column: null });
  });
}
